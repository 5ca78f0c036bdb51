/* The kernel side of a capture: every event of the target's threads as one fixed-size record.
 *
 * Compiled by BCC against the stub headers beside this file: no kernel structure is read, only tracepoint
 * arguments (at offsets that the loader takes from tracefs), registers and helpers. The loader defines
 *   TRACEPIPE_X86_64 | TRACEPIPE_AARCH64, TRACEPIPE_PAGE_BYTES, RING_PAGES, CPU_COUNT, WITH_SCHEDULER,
 *   SWITCH_PREV_PID …: offsets of tracepoint fields, bytes.
 *
 * struct record, 56 bytes, little-endian; record.py decodes it. With the ring's own 8-byte header each takes
 * 64 bytes of the ring, so a span of it is a plain array.
 *
 *    0        8     12     16   20   21   22     24      32      40      48      56
 *    ┌────────┬──────┬──────┬────┬────┬────┬──────┬───────┬───────┬───────┬───────┐
 *    │ ts_ns  │ tid  │ tgid │ id │kind│ 0  │ cpu  │ a[0]  │ a[1]  │ a[2]  │ a[3]  │
 *    └────────┴──────┴──────┴────┴────┴────┴──────┴───────┴───────┴───────┴───────┘
 */
#include <linux/types.h>
#include <uapi/linux/ptrace.h>

struct record {
    u64 ts_ns;
    u32 tid;
    u32 tgid;
    u32 id; /* function index, system call number, or another thread's id */
    u8 kind;
    u8 zero;
    u16 cpu;
    u64 a[4];
};

enum kind {
    CALL_ENTER = 1,   /* id: function index; a: first four arguments */
    LAUNCH_ENTER = 2, /* id: function index; a: function, gridX|gridY, gridZ|blockX, blockY|blockZ (low|high) */
    CALL_RETURN = 3,  /* id: function index; a[0]: result */
    SYSCALL_ENTER = 4, /* id: number; a: first four arguments */
    SYSCALL_EXIT = 5,  /* id: number; a[0]: result */
    SWITCH_OUT = 6,   /* id: 0; a[0]: prev_state of the tracepoint */
    SWITCH_IN = 7,
    WAKEUP = 8,       /* tid: the woken; id: current thread of the waking processor; a[0]: target processor */
    DRIVER_ENTER = 9,   /* id: driver function index; a[0..2]: first three arguments; a[3]: see DRIVER_RETURN */
    DRIVER_RETURN = 10, /* id: driver function index; a[0]: result; a[3]: tgid<<32|tid that it works for, or 0 */
    THREAD_NEW = 11,    /* id: creator's tid; a[0..1]: name */
    THREAD_NAME = 12,   /* a[0..1]: name */
};

/* Which counter a record is counted under when the ring is full; record.py has the same order. */
enum layer { USERSPACE, SYSCALL, KERNEL, SCHEDULER, THREADS, LAYERS };

#define MMAPABLE 1024 /* BPF_F_MMAPABLE: user space reads and writes the map as memory */
#define CLONE_THREAD 0x10000

BPF_RINGBUF_OUTPUT(ring, RING_PAGES);
/* tid → tgid of every thread that is recorded. */
BPF_TABLE("hash", u32, u32, tracked, 65536);
/* tid + 1 of the process whose next exec starts the recording; 0: none. Index 1: nonzero stops all. */
BPF_F_TABLE("array", u32, u64, control, 2, MMAPABLE);
/* Records lost, [layer][cpu]. */
BPF_F_TABLE("array", u32, u64, drops, LAYERS * CPU_COUNT, MMAPABLE);
/* System calls that are recorded, by number. */
BPF_TABLE("array", u32, u8, wanted, 512);

/* Queue items of the driver that the target's threads have queued: what a worker will call → for whom. Items
 * whose function is not probed are never taken out: the oldest make room. */
struct work {
    u64 function;
    u64 argument;
};
BPF_TABLE("lru_hash", struct work, u64, queued, 4096);
/* Worker thread → the item that it runs for the target, from its function's entry to its return. */
struct service {
    u64 served; /* tgid<<32|tid */
    u32 id;
    u32 depth;
};
BPF_TABLE("hash", u32, struct service, serving, 1024);

#define FIELD(type, offset) (*(type *)((char *)args + (offset)))

static inline void count_drop(u32 layer)
{
    u32 slot = layer * CPU_COUNT + bpf_get_smp_processor_id();
    u64 *count = drops.lookup(&slot);
    if (count)
        __sync_fetch_and_add(count, 1);
}

static inline struct record *new_record(u32 layer, u8 kind, u32 tid, u32 tgid, u32 id)
{
    u64 now_ns = bpf_ktime_get_ns();
    struct record *r = ring.ringbuf_reserve(sizeof(struct record));
    if (!r) {
        count_drop(layer);
        return 0;
    }
    r->ts_ns = now_ns;
    r->tid = tid;
    r->tgid = tgid;
    r->id = id;
    r->kind = kind;
    r->zero = 0;
    r->cpu = bpf_get_smp_processor_id();
    r->a[0] = r->a[1] = r->a[2] = r->a[3] = 0;
    return r;
}

/* BCC rewrites map operations only outside macros, hence these functions. */
static inline void submit(struct record *r)
{
    /* 1: BPF_RB_NO_WAKEUP. The consumer polls; waking it would cost the target more than the record. */
    ring.ringbuf_submit(r, 1);
}

/* The thread group of a recorded thread, 0 for all others. */
static inline u32 tracked_tgid(u32 tid)
{
    u32 *tgid = tracked.lookup(&tid);
    return tgid ? *tgid : 0;
}

static inline int is_stopped(void)
{
    u32 slot = 1;
    u64 *stopped = control.lookup(&slot);
    return !stopped || *stopped;
}

/* ── userspace: entry and return of exported functions; the attach cookie tells which ── */

#if defined(TRACEPIPE_X86_64)
#define ARG0(c) ((c)->di)
#define ARG1(c) ((c)->si)
#define ARG2(c) ((c)->dx)
#define ARG3(c) ((c)->cx)
#define ARG4(c) ((c)->r8)
#define ARG5(c) ((c)->r9)
#define RESULT(c) ((c)->ax)
#elif defined(TRACEPIPE_AARCH64)
#define ARG0(c) ((c)->regs[0])
#define ARG1(c) ((c)->regs[1])
#define ARG2(c) ((c)->regs[2])
#define ARG3(c) ((c)->regs[3])
#define ARG4(c) ((c)->regs[4])
#define ARG5(c) ((c)->regs[5])
#define RESULT(c) ((c)->regs[0])
#endif
#define PAIR(low, high) ((u64)(u32)(low) | (u64)(high) << 32)
#define LAUNCH_COOKIE (1ull << 32) /* set for functions with cuLaunchKernel's first seven parameters */

int call_enter(struct pt_regs *ctx)
{
    u32 tid = (u32)bpf_get_current_pid_tgid(), tgid = tracked_tgid(tid);
    if (!tgid)
        return 0;
    u64 cookie = bpf_get_attach_cookie(ctx);
    u8 kind = cookie & LAUNCH_COOKIE ? LAUNCH_ENTER : CALL_ENTER;
    struct record *r = new_record(USERSPACE, kind, tid, tgid, (u32)cookie);
    if (!r)
        return 0;
    r->a[0] = ARG0(ctx);
    if (kind == LAUNCH_ENTER) {
        u32 block_z = 0;
#if defined(TRACEPIPE_X86_64)
        /* The seventh argument: first on the stack, above the return address. */
        bpf_probe_read_user(&block_z, sizeof(block_z), (void *)(ctx->sp + 8));
#else
        block_z = (u32)ctx->regs[6];
#endif
        r->a[1] = PAIR(ARG1(ctx), ARG2(ctx));
        r->a[2] = PAIR(ARG3(ctx), ARG4(ctx));
        r->a[3] = PAIR(ARG5(ctx), block_z);
    } else {
        r->a[1] = ARG1(ctx);
        r->a[2] = ARG2(ctx);
        r->a[3] = ARG3(ctx);
    }
    submit(r);
    return 0;
}

int call_return(struct pt_regs *ctx)
{
    u32 tid = (u32)bpf_get_current_pid_tgid(), tgid = tracked_tgid(tid);
    if (!tgid)
        return 0;
    struct record *r = new_record(USERSPACE, CALL_RETURN, tid, tgid, (u32)bpf_get_attach_cookie(ctx));
    if (!r)
        return 0;
    r->a[0] = RESULT(ctx);
    submit(r);
    return 0;
}

/* ── kernel: entry and return of the NVIDIA driver's functions; the attach cookie tells which ── */

#define QUEUES_COOKIE (1ull << 32) /* set for nv_kthread_q_schedule_q_item(queue, item) */

/* What the item will call, and for whom. NVIDIA's struct nv_kthread_q_item, the same in its open modules 515 to 595
 * (kernel-open/common/inc/nv-kthread-q.h):
 *
 *    0             16                24              32
 *    ┌─────────────┬─────────────────┬───────────────┐
 *    │ q_list_node │ function_to_run │ function_args │
 *    └─────────────┴─────────────────┴───────────────┘
 */
static inline void remember_item(struct pt_regs *ctx, u64 served)
{
    struct work work = {};
    if (!bpf_probe_read_kernel(&work, sizeof(work), (void *)(ARG1(ctx) + 16)))
        queued.update(&work, &served);
}

/* For which thread of the target an untracked one runs this function, 0 if for none. */
static inline u64 served_on_entry(struct pt_regs *ctx, u32 tid, u32 id)
{
    struct work work = {};
    struct service *now = serving.lookup(&tid);
    if (now) {
        if (now->id == id)
            now->depth++;
        return now->served;
    }
    work.function = bpf_get_func_ip(ctx);
    work.argument = ARG0(ctx);
    u64 *served = queued.lookup(&work);
    if (!served || is_stopped())
        return 0;
    struct service started = {.served = *served, .id = id, .depth = 1};
    queued.delete(&work);
    if (serving.update(&tid, &started)) {
        count_drop(KERNEL);
        return 0;
    }
    struct record *r = new_record(THREADS, THREAD_NAME, tid, tid, 0);
    if (r) {
        bpf_get_current_comm(&r->a[0], 16);
        submit(r);
    }
    return started.served;
}

static inline u64 served_on_return(u32 tid, u32 id)
{
    struct service *now = serving.lookup(&tid);
    if (!now)
        return 0;
    u64 served = now->served;
    if (now->id == id && !--now->depth)
        serving.delete(&tid);
    return served;
}

int driver_enter(struct pt_regs *ctx)
{
    u64 ids = bpf_get_current_pid_tgid(), cookie = bpf_get_attach_cookie(ctx), served = 0;
    u32 tid = (u32)ids, tgid = tracked_tgid(tid);
    if (!tgid) {
        /* 0: the idle threads, which share it. Interrupts work there, never a queue's items. */
        served = tid ? served_on_entry(ctx, tid, (u32)cookie) : 0;
        if (!served)
            return 0;
        tgid = ids >> 32;
    }
    if (cookie & QUEUES_COOKIE)
        remember_item(ctx, served ? served : (u64)tgid << 32 | tid);
    struct record *r = new_record(KERNEL, DRIVER_ENTER, tid, tgid, (u32)cookie);
    if (!r)
        return 0;
    r->a[0] = ARG0(ctx);
    r->a[1] = ARG1(ctx);
    r->a[2] = ARG2(ctx);
    r->a[3] = served;
    submit(r);
    return 0;
}

int driver_return(struct pt_regs *ctx)
{
    u64 ids = bpf_get_current_pid_tgid(), served = 0;
    u32 tid = (u32)ids, tgid = tracked_tgid(tid), id = (u32)bpf_get_attach_cookie(ctx);
    if (!tgid) {
        served = tid ? served_on_return(tid, id) : 0;
        if (!served)
            return 0;
        tgid = ids >> 32;
    }
    struct record *r = new_record(KERNEL, DRIVER_RETURN, tid, tgid, id);
    if (!r)
        return 0;
    r->a[0] = RESULT(ctx);
    r->a[3] = served;
    submit(r);
    return 0;
}

/* ── syscall ── */

/* Numbers above the table include −1 (a call that ptrace or seccomp cancelled) as unsigned. */
static inline int is_wanted(u64 number)
{
    u32 key = (u32)number;
    if (number >= 512)
        return 0;
    u8 *flag = wanted.lookup(&key);
    return flag && *flag;
}

int syscall_enter(void *args)
{
    u32 tid = (u32)bpf_get_current_pid_tgid(), tgid = tracked_tgid(tid);
    if (!tgid)
        return 0;
    u64 number = FIELD(u64, ENTER_ID);
    if (!is_wanted(number))
        return 0;
    struct record *r = new_record(SYSCALL, SYSCALL_ENTER, tid, tgid, (u32)number);
    if (!r)
        return 0;
    r->a[0] = FIELD(u64, ENTER_ARGS);
    r->a[1] = FIELD(u64, ENTER_ARGS + 8);
    r->a[2] = FIELD(u64, ENTER_ARGS + 16);
    r->a[3] = FIELD(u64, ENTER_ARGS + 24);
    submit(r);
    return 0;
}

int syscall_exit(void *args)
{
    u32 tid = (u32)bpf_get_current_pid_tgid(), tgid = tracked_tgid(tid);
    if (!tgid)
        return 0;
    u64 number = FIELD(u64, EXIT_ID);
    if (!is_wanted(number))
        return 0;
    struct record *r = new_record(SYSCALL, SYSCALL_EXIT, tid, tgid, (u32)number);
    if (!r)
        return 0;
    r->a[0] = FIELD(u64, EXIT_RET);
    submit(r);
    return 0;
}

/* ── scheduler ── */

int sched_switch(void *args)
{
    u32 prev = FIELD(u32, SWITCH_PREV_PID), next = FIELD(u32, SWITCH_NEXT_PID);
    u32 tgid = tracked_tgid(prev);
    if (tgid) {
        u64 state = FIELD(u64, SWITCH_PREV_STATE);
        struct record *r = new_record(SCHEDULER, SWITCH_OUT, prev, tgid, 0);
        if (r) {
            r->a[0] = state;
            submit(r);
        }
        /* EXIT_DEAD or EXIT_ZOMBIE as the tracepoint shows them: the thread will not run again. */
        if (state & 0x30)
            tracked.delete(&prev);
    }
    tgid = tracked_tgid(next);
    if (tgid) {
        struct record *r = new_record(SCHEDULER, SWITCH_IN, next, tgid, 0);
        if (r)
            submit(r);
    }
    return 0;
}

int sched_wakeup(void *args)
{
    u32 tid = FIELD(u32, WAKEUP_PID), tgid = tracked_tgid(tid);
    if (!tgid)
        return 0;
    struct record *r = new_record(SCHEDULER, WAKEUP, tid, tgid, (u32)bpf_get_current_pid_tgid());
    if (!r)
        return 0;
    r->a[0] = FIELD(u32, WAKEUP_TARGET_CPU);
    submit(r);
    return 0;
}

/* ── which threads: armed at exec, followed through clone, forgotten at the end ── */

int process_exec(void *args)
{
    u64 ids = bpf_get_current_pid_tgid();
    u32 tid = (u32)ids, tgid = ids >> 32, slot = 0, old_tid = FIELD(u32, EXEC_OLD_PID);
    u64 *armed = control.lookup(&slot);
    int starts = armed && *armed == (u64)tgid + 1;
    if (is_stopped() || (!starts && !tracked_tgid(tid) && !tracked_tgid(old_tid)))
        return 0;
    if (starts)
        *armed = 0;
    /* Exec from a thread that is not the leader takes over the leader's id. */
    if (old_tid != tid)
        tracked.delete(&old_tid);
    if (tracked.update(&tid, &tgid))
        count_drop(THREADS);
    struct record *r = new_record(THREADS, THREAD_NAME, tid, tgid, 0);
    if (r) {
        bpf_get_current_comm(&r->a[0], 16);
        submit(r);
    }
#if WITH_SCHEDULER
    /* It is running already; no switch will say so. */
    if (starts) {
        r = new_record(SCHEDULER, SWITCH_IN, tid, tgid, 0);
        if (r)
            submit(r);
    }
#endif
    return 0;
}

int thread_new(void *args)
{
    u32 creator = (u32)bpf_get_current_pid_tgid(), creator_tgid = tracked_tgid(creator);
    if (!creator_tgid || is_stopped())
        return 0;
    u32 tid = FIELD(u32, NEWTASK_PID);
    u32 tgid = FIELD(u64, NEWTASK_FLAGS) & CLONE_THREAD ? creator_tgid : tid;
    if (tracked.update(&tid, &tgid))
        count_drop(THREADS);
    struct record *r = new_record(THREADS, THREAD_NEW, tid, tgid, creator);
    if (!r)
        return 0;
    bpf_get_current_comm(&r->a[0], 16);
    submit(r);
    return 0;
}

/* A thread names itself or another of its process; the tracepoint's field is the named one. */
int thread_rename(void *args)
{
    u32 tid = FIELD(u32, RENAME_PID), tgid = tracked_tgid(tid);
    if (!tgid)
        return 0;
    struct record *r = new_record(THREADS, THREAD_NAME, tid, tgid, 0);
    if (!r)
        return 0;
    /* Four-byte reads: the field is not aligned to eight. */
    u32 *name = (u32 *)&r->a[0];
    name[0] = FIELD(u32, RENAME_NEWCOMM);
    name[1] = FIELD(u32, RENAME_NEWCOMM + 4);
    name[2] = FIELD(u32, RENAME_NEWCOMM + 8);
    name[3] = FIELD(u32, RENAME_NEWCOMM + 12);
    submit(r);
    return 0;
}

/* Attached only without the scheduler layer, whose last switch of a thread comes later than this. */
int process_exit(void *args)
{
    u32 tid = (u32)bpf_get_current_pid_tgid();
    tracked.delete(&tid);
    return 0;
}
