/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/* The BPF programs of a capture: they write every event of the recorded threads as records of fixed size.
 *
 * BCC compiles this file against the stub headers next to it; compile.py writes the bytecode to ship. No kernel
 * structure is read, only tracepoint arguments, registers and the results of helpers. The same bytecode runs on
 * every kernel. What differs between captures is filled in when it is loaded (bytecode.py), in these places:
 *
 *   MAP(n)       the descriptor of map n (maps.py creates them)
 *   CONFIG(n)    a 64-bit constant
 *   FIELD(t, n)  field n of a tracepoint's record, at the offset that tracefs shows
 *
 * The compiler defines TRACEPIPE_X86_64 or TRACEPIPE_AARCH64.
 *
 * struct record has 56 bytes, little-endian; record.py decodes it. With the ring's 8-byte header each record takes
 * 64 bytes of the ring, so a span of the ring is an array of records.
 *
 *    0        8     12     16   20   21     22     24      32      40      48      56
 *    ┌────────┬─────┬──────┬────┬────┬──────┬──────┬───────┬───────┬───────┬───────┐
 *    │ ts_ns  │ tid │ tgid │ id │kind│ torn │ cpu  │ a[0]  │ a[1]  │ a[2]  │ a[3]  │
 *    └────────┴─────┴──────┴────┴────┴──────┴──────┴───────┴───────┴───────┴───────┘
 */
#include <linux/types.h>
#include <uapi/linux/ptrace.h>

struct record {
    u64 ts_ns;
    u32 tid;
    u32 tgid;
    u32 id; /* probe index, system call number, or another thread's id */
    u8 kind;
    u8 torn; /* 1: a record that belongs before this one (MORE, SERVED, TEXT) was lost */
    u16 cpu;
    u64 a[4];
};

enum kind {
    CALL_ENTER = 1,    /* id: probe; a: the signature's slots 0 to 3 */
    MORE = 2,          /* id: probe; a: slots 4 to 7 of the CALL_ENTER that follows */
    CALL_RETURN = 3,   /* id: probe; a[0]: result; a[1]: what the `out` argument points to */
    SYSCALL_ENTER = 4, /* id: number; a: first four arguments */
    SYSCALL_EXIT = 5,  /* id: number; a[0]: result */
    SWITCH_OUT = 6,    /* a[0]: prev_state of the tracepoint; a[1]: 1: its switch-in was not reported; 2: it ran
                          when recording began; a[2]: its stack; 0: not known */
    SWITCH_IN = 7,     /* a[1]: 1: its last switch-out was not reported; a[2]: 1 + the thread that woke it */
    WAKEUP = 8,        /* tid: the woken thread; id: current thread of the waking processor; a[0]: target processor */
    MIGRATE = 9,       /* tid: the moved thread; a[0]: its old processor; a[1]: its new one */
    SERVED = 10,       /* a[0]: tgid<<32|tid of the thread that the following call works for */
    THREAD_NEW = 11,   /* id: creator's tid; a[0..1]: name */
    THREAD_NAME = 12,  /* a[0..1]: name */
    TEXT = 13,         /* id: probe; a: 31 bytes of a `str` argument of the CALL_ENTER or EVENT that follows, and a
                          NUL; several arguments follow each other */
    EVENT = 14,        /* id: probe of a tracepoint; a: its arguments */
    THREAD_IDS = 15,   /* a[0]: tgid<<32|tid in the capture's pid namespace */
    WINDOW = 16,       /* id: its cause; a[0]: 1: events are recorded from here on; 0: up to here */
    THREAD_END = 17,   /* only where no last SWITCH_OUT, of the scheduler layer in a window, shows the end */
    ON_CPU_SAMPLE = 18,       /* the thread was running; a[0]: its stack; 0: not known */
    FRAMES = 19,        /* id 0: a[0]: number of a stack; a[1]: how many addresses | Python's frames << 16 | 1 << 32:
                          there are more; then from id 1 on its words, four a record: addresses from the innermost one
                          on, and in a new record Python's frames, each with its code and its instruction */
};

/* The counters of records; record.py has the same order. THREADS counts threads that are not followed,
 * UNSEEN wakeups and migrations for which the kernel ran no program. */
enum layer { USERSPACE, SYSCALL, KERNEL, SCHEDULER, MEMORY, TRANSFER, HOOK, THREADS, HOST_SAMPLE, UNSEEN, LAYERS };

u64 bpf_pseudo_load(u64 kind, u64 value) asm("llvm.bpf.pseudo");
#define MAP(n) ((uintptr_t)bpf_pseudo_load(1, n)) /* 1: BPF_PSEUDO_MAP_FD */
#define CONFIG(n) bpf_pseudo_load(9, n)           /* 9: a kind that no kernel knows; bytecode.py replaces it */
#define FIELD(type, n) (*(type *)((char *)args + 0x4000 + 64 * (n)))
#define FIELD_AT(type, n, byte) (*(type *)((char *)args + 0x4000 + 64 * (n) + (byte)))

/* Maps, in the order of maps.py. */
#define RING MAP(1)     /* records */
#define TRACKED MAP(2)  /* tid → struct thread: the recorded threads */
#define CONTROL MAP(3)  /* enum control */
#define DROPS MAP(4)    /* [layer][processor] records dropped because the ring was full */
#define WANTED MAP(5)   /* [number] nonzero: this system call is recorded */
#define QUEUED MAP(6)   /* struct work → tgid<<32|tid that queued it */
#define SERVING MAP(7)  /* tid of a worker → struct service */
#define SPECS MAP(8)    /* [probe] struct spec */
#define OPEN MAP(9)     /* struct frame → struct open: calls in progress */
#define SAMPLED MAP(10) /* [probe] calls seen on this processor */
#define FILTERED MAP(11) /* [layer][processor] records that a filter left out */
#define ADOPTED MAP(12) /* tgid in the capture's pid namespace → nonzero: record its threads from their next event on */
#define PYTHONS MAP(13) /* tgid → struct python */
#define STATES MAP(14)  /* tid → address of its thread state in Python, or NO_STATE | when to look again */
#define KNOWN MAP(15)   /* number of a stack → nonzero: its words were sent */
#define WALKED MAP(16)  /* [0: a sample, 1: a switch] struct stack, on each processor */

/* Constants, in the order of bytecode.py. */
#define PROCESSORS CONFIG(0)
#define WITH_SCHEDULER CONFIG(1)
#define EVERYONE CONFIG(2)        /* every new thread is recorded */
#define CHILDREN CONFIG(3)        /* the processes that recorded ones fork are recorded too */
#define MIN_DURATION_NS CONFIG(4) /* shorter calls are left out */
#define SAMPLE CONFIG(5)          /* every SAMPLEth call is recorded */
#define COMM_LOW CONFIG(6)        /* 16 bytes: processes that execute a program of this name are recorded; 0: none */
#define COMM_HIGH CONFIG(7)
#define NAMESPACE_DEV CONFIG(8) /* of the capture's pid namespace; inode 0: the initial one */
#define NAMESPACE_INO CONFIG(9)
#define PROBE CONFIG(10) /* the first probe of a hook on a tracepoint, which has no cookie */
#define OWN_TGID CONFIG(11)
#define TEXT_0 CONFIG(12) /* a text of that hook: enum text_form << 16 | offset of its field; 0: no text */
#define TEXT_1 CONFIG(13)
#define TEXT_2 CONFIG(14)
#define TEXT_3 CONFIG(15)
#define MAY_SLEEP CONFIG(16) /* the program may sleep until a page is loaded */
#define BEGIN_AT CONFIG(17) /* a window begins at the hit of this number of what begins windows */
#define END_AT CONFIG(18)   /* and ends at the hit of this number of what ends them */
#define CLOCK_AHEAD_NS CONFIG(19) /* the offset of the capture's time namespace to CLOCK_MONOTONIC */
#define WITH_SAMPLES CONFIG(21) /* 1: stacks are recorded; 2: without the layer scheduler */
#define PROBES CONFIG(20) /* how many probes from PROBE on: a hit is of the first one whose condition it meets */

#define HOLD_NS 100000000ull
#define HOLD_UNSEEN_NS 10000000ull
#define CLONE_THREAD 0x10000
#define BPF_RB_NO_WAKEUP 1 /* the consumer polls: waking it would cost the target more than the record does */

enum control {
    ARMED,     /* tid + 1 of the process whose next exec starts the recording */
    STOPPED,   /* nonzero: nothing is recorded any more */
    WINDOW_NS, /* when the open window began; 0: no window is open, and threads are only followed */
    WINDOWS_LEFT, /* how many windows may still begin by a trigger */
    BEGIN_HITS, /* hits of what begins windows, since the last one */
    END_HITS,   /* hits of what ends them, since the window began */
    ASKED_NS,   /* when a call requested a window, for which the capture attaches its probes; 0: no request; | OVER */
    ASKED_BY,   /* tgid<<32|tid of that call */
    SEEN_NS,    /* the ASKED_NS that the capture has seen */
    IS_READY,   /* all probes of windows are attached: a window can begin at the call */
    IS_BUSY,    /* the capture is attaching probes, and looks at requests afterwards */
    END_ASKED_NS, /* when the call that ended a window began to wait for libraries in the command; 1: seen; else 0 */
};

struct thread {
    u32 tgid;
    u16 running; /* 0 no, 1 yes, 2 not known yet */
    u8 ids_sent; /* its ids in the capture's namespace were sent */
    u8 asleep; /* it left its processor to wait, and no wakeup was seen since then */
    u64 window_ns; /* the window in which `running`, `asleep` and `queued_on` are known */
    u64 queued_on; /* 1 + the processor that it left, or to which it was moved since; 0: not known */
    u64 woken_by;  /* 1 + the thread that ran where it was woken since it left; 0: not known */
    u64 nearest;   /* a hash of Python's innermost frames where it last left a processor, */
    u64 stack;     /* the number of its stack then, */
    u64 walked_ns; /* and when that was; 0: it has not left one */
};

struct spec {
    u8 low[8];  /* position + 1 of each slot's value, 0 for none */
    u8 high[8]; /* position + 1 of the value in its upper half, 0 for none */
    u8 slots;
    u8 layer;
    u8 out;       /* position + 1 of the pointer whose target is read at the return */
    u8 out_bytes; /* size of what it points to */
    u8 text;      /* position + 1 of the pointer to text */
    u8 flags;
    u8 condition; /* enum condition */
    u8 condition_at; /* position + 1 of the compared value; for a tracepoint 1 + its index */
    u8 condition_bits; /* its width */
    u8 condition_signed;
    u8 hashed;    /* slot + 1 that gets the hash of a structure: of what its word points to, */
    u8 hashed_at; /* or, unless 0, of what begins at this position + 1 on the stack */
    u8 zero[4];
    u64 condition_value;
};
enum flags {
    PAIRED = 1,  /* its return needs data of its entry: struct open */
    INSTANT = 2, /* no return is recorded */
    QUEUES = 4,  /* nv_kthread_q_schedule_q_item(queue, item) */
    IN_KERNEL = 8,
    EVERYWHERE = 16, /* of all threads, not only of recorded ones */
    UNFILTERED = 32, /* recorded however short it is */
    NAMES = 64,      /* says what a handle is, which calls in a later window need */
};
enum condition { ALWAYS, EQUAL, UNEQUAL, LESS, AT_MOST, MORE_THAN, AT_LEAST, COMMON_BIT };

struct frame {
    u64 at; /* for a function of a program its stack pointer; of the kernel its probe; for a system call −1 */
    u64 tid;
};
struct open {
    u64 ts_ns;
    u64 out;
    u64 text;
    u64 a[8];
};

/* A queue item of the driver that a recorded thread has queued: what a worker will call. */
struct work {
    u64 function;
    u64 argument;
};
/* The item that a worker runs for a recorded thread, from its function's entry to its return. */
struct service {
    u64 served; /* tgid<<32|tid */
    u32 id;
    u32 depth;
};

/* CLOCK_MONOTONIC as the capture and the command read it. */
static inline u64 clock_ns(void)
{
    return bpf_ktime_get_ns() + CLOCK_AHEAD_NS;
}

static inline void count(uintptr_t map, u32 layer, u64 records)
{
    u32 slot = layer * (u32)PROCESSORS + bpf_get_smp_processor_id();
    u64 *counter = bpf_map_lookup_elem_(map, &slot);
    if (counter)
        __sync_fetch_and_add(counter, records);
}

static inline struct record *reserve(u8 kind, u32 tid, u32 tgid, u32 id, u64 ts_ns)
{
    struct record *r = bpf_ringbuf_reserve((void *)RING, sizeof(struct record), 0);
    if (!r)
        return 0;
    r->ts_ns = ts_ns;
    r->tid = tid;
    r->tgid = tgid;
    r->id = id;
    r->kind = kind;
    r->torn = 0;
    r->cpu = bpf_get_smp_processor_id();
    r->a[0] = r->a[1] = r->a[2] = r->a[3] = 0;
    return r;
}

static inline struct record *new_record(u32 layer, u8 kind, u32 tid, u32 tgid, u32 id)
{
    struct record *r = reserve(kind, tid, tgid, id, clock_ns());
    if (!r)
        count(DROPS, layer, 1);
    return r;
}

static inline void submit(struct record *r)
{
    bpf_ringbuf_submit(r, BPF_RB_NO_WAKEUP);
}

static inline u64 *control(u32 slot)
{
    return bpf_map_lookup_elem_(CONTROL, &slot);
}

static inline int is_stopped(void)
{
    u64 *stopped = control(STOPPED);
    return !stopped || *stopped;
}

/* When the open window began; 0 if none is open. */
static inline u64 window(void)
{
    u64 *begun_ns = control(WINDOW_NS);
    return begun_ns ? *begun_ns : 0;
}

/* ── which threads ── */

struct namespace_ids {
    u32 tid;
    u32 tgid;
};

static inline struct thread *track(u32 tid, u32 tgid, u16 running)
{
    struct thread thread = {.tgid = tgid, .running = running, .window_ns = window()};
    if (bpf_map_update_elem_(TRACKED, &tid, &thread, 0))
        count(DROPS, THREADS, 1);
    return bpf_map_lookup_elem_(TRACKED, &tid);
}

/* Report that the current thread runs: it is recorded from now on, and no switch-in will show that. */
static inline void send_running(u32 tid, u32 tgid)
{
    if (!WITH_SCHEDULER || !window())
        return;
    struct record *r = new_record(SCHEDULER, SWITCH_IN, tid, tgid, 0);
    if (r)
        submit(r);
}

/* The current thread, if it is recorded. In its own pid namespace, a capture knows the ids of older threads
 * only in that namespace: they are found here, at their next event. */
static inline struct thread *current_thread(u64 ids)
{
    u32 tid = (u32)ids;
    struct thread *thread = bpf_map_lookup_elem_(TRACKED, &tid);
    if (!NAMESPACE_INO || (thread && thread->ids_sent))
        return thread;
    struct namespace_ids here = {};
    if (bpf_get_ns_current_pid_tgid(NAMESPACE_DEV, NAMESPACE_INO, (void *)&here, sizeof(here)))
        return thread;
    if (!thread) {
        if (!bpf_map_lookup_elem_(ADOPTED, &here.tgid) || is_stopped())
            return 0;
        thread = track(tid, ids >> 32, 1);
        if (!thread)
            return 0;
        send_running(tid, ids >> 32);
    }
    struct record *r = new_record(THREADS, THREAD_IDS, tid, ids >> 32, 0);
    if (r) {
        r->a[0] = (u64)here.tgid << 32 | here.tid;
        submit(r);
        thread->ids_sent = 1;
    }
    return thread;
}

static inline void send_name(u8 kind, u32 tid, u32 tgid, u32 id)
{
    struct record *r = new_record(THREADS, kind, tid, tgid, id);
    if (!r)
        return;
    bpf_get_current_comm(&r->a[0], 16);
    submit(r);
}

/* ── stacks: the addresses of native code by frame pointers, and Python's frames ── */

#define ADDRESSES 32
#define PYTHON_FRAMES 96
#define PYTHON_THREADS 1024
#define NEAREST 4
#define SAME_NS 1000000ull
#define NONE 0xffff /* of an offset */
#define OF_C 3      /* the owner of a frame that stands for a call from C: Python does not show it */
#define NO_STATE (1ull << 63)
/* A thread is in no list before its Python has begun, and threads of C never are. After the first looks, each doubles
 * the time to the next one, from 1 ms to a quarter of a second. How many there were is kept above the time of the next.
 */
#define LOOK_AGAIN_NS 1000000ull
#define LOOKS_AT 56
#define LOOKS_AT_ONCE 4
#define LOOKS_MOST 12
#define CODE_TAGS 7ull /* from Python 3.14 on, a frame's references may have some in low bits */

/* Where the Python of a process has its states and frames: offsets in bytes, of host_stacks.py. */
struct python {
    u64 interpreter; /* the address of the pointer to the main interpreter */
    u16 threads;     /* of the first thread state in the interpreter */
    u16 next;        /* and from one to the next */
    u16 id;          /* of the thread's id; where there is none, of its pthread, in which it is at in_pthread */
    u16 in_pthread;
    u16 frame;       /* of the frame in the thread state, or of a struct between them, in which it is at `between` */
    u16 between;
    u16 previous;
    u16 code;
    u16 at;
    u16 owner;
    u16 lines; /* of the table of lines in a code object */
    u16 frame_bytes; /* how much of a frame is read */
};

/* The counts are in memory, as the verifier would follow each value of a register. */
struct stack {
    u64 addresses[ADDRESSES]; /* 0 behind the last one */
    u64 frames[2 * PYTHON_FRAMES]; /* code and instruction; no code: a frame that stands for C. The upper 16 bits of
                                      a code are a mark of the address of its table of lines */
    u64 hash;
    u32 address_count;
    u32 frame_count;
    u64 further; /* nonzero: there are more frames */
    u64 nearest; /* a hash of the innermost frames */
    u8 frame[136];
};

static inline u64 word_of_user(u64 at)
{
    u64 word = 0;
    bpf_probe_read_user(&word, sizeof(word), (void *)at);
    return word;
}

static inline u32 id_of_state(struct python *python, u64 state)
{
    u64 id = word_of_user(state + python->id);
    return python->in_pthread == NONE ? (u32)id : (u32)word_of_user(id + python->in_pthread);
}

/* The current thread's state in its Python; 0 if it has none. */
static inline u64 state_of(struct python *python, u32 tid)
{
    u32 shown = tid;
    if (NAMESPACE_INO) {
        struct namespace_ids here = {};
        if (bpf_get_ns_current_pid_tgid(NAMESPACE_DEV, NAMESPACE_INO, (void *)&here, sizeof(here)))
            return 0;
        shown = here.tid;
    }
    u64 *known = bpf_map_lookup_elem_(STATES, &tid), now_ns = bpf_ktime_get_ns();
    u64 looks = 0;
    if (known && *known & NO_STATE) {
        if (now_ns < (*known & ((1ull << LOOKS_AT) - 1)))
            return 0;
        looks = (*known & ~NO_STATE) >> LOOKS_AT;
        looks += looks < LOOKS_MOST;
    } else if (known && id_of_state(python, *known) == shown) {
        return *known;
    }
    u64 found = NO_STATE | looks << LOOKS_AT | (now_ns + (looks < LOOKS_AT_ONCE ? 0 : LOOK_AGAIN_NS << (looks - LOOKS_AT_ONCE & 15)));
    u64 state = word_of_user(word_of_user(python->interpreter) + python->threads);
    for (int i = 0; i < PYTHON_THREADS && state; i++) {
        if (id_of_state(python, state) == shown) {
            found = state;
            break;
        }
        state = word_of_user(state + python->next);
    }
    bpf_map_update_elem_(STATES, &tid, &found, 0);
    return found & NO_STATE ? 0 : found;
}

static inline u64 mixed(u64 hash, u64 word)
{
    hash = (hash ^ word) * 0x9e3779b97f4a7c15ull;
    return hash ^ hash >> 32;
}

/* The address of a code object, marked with that of its table of lines: another code object may be at the address of a
 * freed one, but hardly with the same table. */
static inline u64 marked(struct python *python, u64 code)
{
    u64 lines = code ? word_of_user(code + python->lines) : 0;
    return code | (lines >> 4 ^ lines >> 20) << 48;
}

/* Hides from the compiler what it knows of a value. It would compute the number of a loop's rounds before the loop, and
 * verifiers before Linux 6.8 would not know that it is bounded. */
#define HIDE(value) asm volatile("" : "+r"(value))

#define FRAME_WORD(stack, offset) (*(u64 *)&(stack)->frame[(offset) & 120])

/* Send the words of the current thread's stack, unless they were sent before; returns the stack's number, 0 where it is
 * not known. At a switch (`thread` is given), threads may come here 100,000 times a second: the stack is taken for that
 * of a moment ago where Python's innermost frames are the same. */
static inline u64 send_stack(void *ctx, struct thread *thread, u32 tid, u32 tgid)
{
    u32 which = !!thread;
    u64 now_ns = clock_ns();
    struct stack *stack = bpf_map_lookup_elem_(WALKED, &which);
    if (!stack)
        return 0;
    stack->hash = mixed(tgid, 0);
    stack->address_count = stack->frame_count = stack->further = stack->nearest = 0;
    struct python *python = bpf_map_lookup_elem_(PYTHONS, &tgid);
    u64 state = python ? state_of(python, tid) : 0;
    if (python && state) {
        u64 frame = word_of_user(state + python->frame);
        if (frame && python->between != NONE)
            frame = word_of_user(frame + python->between);
        for (int i = 0; i < PYTHON_FRAMES && frame; i++) {
            if (i == NEAREST && thread) {
                stack->nearest = mixed(stack->hash, frame);
                if (stack->nearest == thread->nearest && now_ns - thread->walked_ns < SAME_NS)
                    return thread->stack;
            }
            if (bpf_probe_read_user(stack->frame, python->frame_bytes & 127, (void *)frame))
                break;
            u64 code = FRAME_WORD(stack, python->code) & ~CODE_TAGS, at = FRAME_WORD(stack, python->at);
            if (python->owner != NONE && stack->frame[python->owner & 127] == OF_C)
                code = at = 0;
            else if (!thread)
                code = marked(python, code);
            stack->frames[2 * i] = code;
            stack->frames[2 * i + 1] = at;
            stack->hash = mixed(mixed(stack->hash, code), at);
            stack->frame_count++;
            frame = FRAME_WORD(stack, python->previous);
        }
        stack->further = frame;
    }
    __builtin_memset(stack->addresses, 0, sizeof(stack->addresses));
    long size = bpf_get_stack(ctx, stack->addresses, sizeof(stack->addresses), 1 << 8 /* BPF_F_USER_STACK */);
    if (size > 0)
        stack->address_count = (u32)size / 8;
    for (int i = 0; i < ADDRESSES; i++)
        stack->hash = mixed(stack->hash, stack->addresses[i]);
    u32 addresses = stack->address_count, frames = stack->frame_count;
    if (!addresses && !frames)
        return 0;
    u64 hash = mixed(stack->hash, addresses | frames << 16) | 1;
    if (thread) {
        thread->nearest = stack->nearest;
        thread->stack = hash;
        thread->walked_ns = now_ns;
    }
    if (bpf_map_lookup_elem_(KNOWN, &hash))
        return hash;
    struct record *r = reserve(FRAMES, tid, tgid, 0, now_ns);
    if (!r)
        return 0;
    r->a[0] = hash;
    r->a[1] = addresses | (u64)frames << 16 | (u64) !!stack->further << 32;
    submit(r);
    for (u32 round = 0;; round++) {
        u32 i = round;
        HIDE(i);
        if (i >= ADDRESSES / 4 || 4 * i >= addresses)
            break;
        r = reserve(FRAMES, tid, tgid, 1 + i, now_ns);
        if (!r)
            return 0;
        __builtin_memcpy(r->a, &stack->addresses[4 * i], sizeof(r->a));
        submit(r);
    }
    for (u32 round = 0;; round++) {
        u32 i = round;
        HIDE(i);
        if (i >= PYTHON_FRAMES / 2 || 2 * i >= frames)
            break;
        u64 first = stack->frames[4 * i], second = 2 * i + 1 < frames ? stack->frames[4 * i + 2] : 0;
        if (thread && python) {
            first = marked(python, first);
            second = marked(python, second);
        }
        r = reserve(FRAMES, tid, tgid, 1 + i, now_ns);
        if (!r)
            return 0;
        r->a[0] = first;
        r->a[1] = stack->frames[4 * i + 1];
        r->a[2] = second;
        r->a[3] = stack->frames[4 * i + 3];
        submit(r);
    }
    u64 sent = 1;
    bpf_map_update_elem_(KNOWN, &hash, &sent, 0);
    return hash;
}

/* The clock of a processor went off while a thread ran on it. */
int host_sample(void *ctx)
{
    u64 ids = bpf_get_current_pid_tgid();
    struct thread *thread = (u32)ids && window() ? current_thread(ids) : 0;
    if (!thread)
        return 0;
    u64 stack = send_stack(ctx, 0, (u32)ids, ids >> 32);
    struct record *r = new_record(HOST_SAMPLE, ON_CPU_SAMPLE, (u32)ids, thread->tgid, 0);
    if (!r)
        return 0;
    r->a[0] = stack;
    submit(r);
    return 0;
}

/* ── calls: entry and return of functions; the attach cookie identifies the probe ── */

#if defined(TRACEPIPE_X86_64)
#define REGISTERS 6
#define FIRST(c) ((c)->di)
#define SECOND(c) ((c)->si)
#define RESULT(c) ((c)->ax)
#define STACK(c) ((c)->sp + 8) /* above the return address */
/* A function that has returned has removed the return address from the stack. */
#define FRAME_AT_ENTRY(c) ((c)->sp + 8)
#define COPY_REGISTERS(w, c)                                                                                    \
    do {                                                                                                       \
        (w)->in[0] = (c)->di;                                                                                  \
        (w)->in[1] = (c)->si;                                                                                  \
        (w)->in[2] = (c)->dx;                                                                                  \
        (w)->in[3] = (c)->cx;                                                                                  \
        (w)->in[4] = (c)->r8;                                                                                  \
        (w)->in[5] = (c)->r9;                                                                                  \
    } while (0)
#elif defined(TRACEPIPE_AARCH64)
#define REGISTERS 8
#define FIRST(c) ((c)->regs[0])
#define SECOND(c) ((c)->regs[1])
#define RESULT(c) ((c)->regs[0])
#define STACK(c) ((c)->sp)
#define FRAME_AT_ENTRY(c) ((c)->sp)
#define COPY_REGISTERS(w, c)                                                                                    \
    do {                                                                                                       \
        (w)->in[0] = (c)->regs[0];                                                                             \
        (w)->in[1] = (c)->regs[1];                                                                             \
        (w)->in[2] = (c)->regs[2];                                                                             \
        (w)->in[3] = (c)->regs[3];                                                                             \
        (w)->in[4] = (c)->regs[4];                                                                             \
        (w)->in[5] = (c)->regs[5];                                                                             \
        (w)->in[6] = (c)->regs[6];                                                                             \
        (w)->in[7] = (c)->regs[7];                                                                             \
    } while (0)
#endif

/* The arguments of a call: a copy of the registers, as the verifier allows no variable index into them. */
struct words {
    u64 in[8];
    u64 stack;
    u64 in_kernel;
};

static inline u64 word(struct words *words, u32 position_plus_1)
{
    u32 n = position_plus_1 - 1;
    u64 value = 0;
    if (n < REGISTERS)
        return words->in[n & 7];
    void *at = (void *)(words->stack + 8 * (u64)(n - REGISTERS));
    if (words->in_kernel)
        bpf_probe_read_kernel(&value, sizeof(value), at);
    else
        bpf_probe_read_user(&value, sizeof(value), at);
    return value;
}

/* 64 bits that distinguish structures of 128 bytes in the program; 0 if they cannot be read. */
static inline u64 hash_of(u64 at)
{
    u64 in[16], hash = 0xcbf29ce484222325ull;
    if (bpf_probe_read_user(in, sizeof(in), (void *)at))
        return 0;
    for (int i = 0; i < 16; i++) {
        hash = (hash ^ in[i]) * 0x100000001b3ull;
        hash ^= hash >> 32;
    }
    return hash;
}

static inline int is_met(struct spec *spec, u64 value)
{
    u32 unused = 64 - spec->condition_bits;
    u64 want = spec->condition_value;
    u8 op = spec->condition;
    value = value << (unused & 63) >> (unused & 63);
    if (op == EQUAL)
        return value == want;
    if (op == UNEQUAL)
        return value != want;
    if (op == COMMON_BIT)
        return !!(value & want);
    if (spec->condition_signed) {
        /* With the sign bit inverted, signed numbers have the order of unsigned ones. */
        u64 sign = 1ull << ((spec->condition_bits - 1) & 63);
        value ^= sign;
        want ^= sign;
    }
    if (op == LESS)
        return value < want;
    if (op == AT_MOST)
        return value <= want;
    if (op == MORE_THAN)
        return value > want;
    return value >= want;
}

/* Load a page of the program that was not touched before: one of its constants may be in such a page.
 * Not allowed while a record is reserved, as the ring's reader waits for that record. */
static inline void fault_in(u64 at)
{
    char touched;
    if (bpf_probe_read_user(&touched, 1, (void *)at))
        bpf_copy_from_user(&touched, 1, (void *)at);
}

/* Send up to eight records of text; returns 1 if one of them was lost. */
static inline int send_text(u64 text, int in_kernel, u32 tid, u32 tgid, u32 id, u64 ts_ns)
{
    for (int i = 0; i < 8; i++) {
        if (MAY_SLEEP && !in_kernel) {
            fault_in(text + 31 * i);
            fault_in(text + 31 * i + 30);
        }
        struct record *r = reserve(TEXT, tid, tgid, id, ts_ns);
        if (!r)
            return 1;
        long length = in_kernel ? bpf_probe_read_kernel_str(&r->a, 32, (void *)(text + 31 * i))
                                : bpf_probe_read_user_str(&r->a, 32, (void *)(text + 31 * i));
        submit(r);
        if (length < 32)
            return 0;
    }
    return 0;
}

static inline void send_entry(struct spec *spec, struct open *call, u64 served, u32 tid, u32 tgid, u32 id)
{
    u8 torn = 0;
    struct record *r;
    if (spec->slots > 4) {
        r = reserve(MORE, tid, tgid, id, call->ts_ns);
        if (r) {
            r->a[0] = call->a[4];
            r->a[1] = call->a[5];
            r->a[2] = call->a[6];
            r->a[3] = call->a[7];
            submit(r);
        }
        torn |= !r;
    }
    if (call->text)
        torn |= send_text(call->text, spec->flags & IN_KERNEL, tid, tgid, id, call->ts_ns);
    if (served) {
        r = reserve(SERVED, tid, tgid, id, call->ts_ns);
        if (r) {
            r->a[0] = served;
            submit(r);
        }
        torn |= !r;
    }
    r = reserve(CALL_ENTER, tid, tgid, id, call->ts_ns);
    if (!r) {
        count(DROPS, spec->layer, 1);
        return;
    }
    r->torn = torn;
    r->a[0] = call->a[0];
    r->a[1] = call->a[1];
    r->a[2] = call->a[2];
    r->a[3] = call->a[3];
    submit(r);
}

/* 1 if the filters accept this call. */
static inline int passes(struct spec *spec, u32 id)
{
    if (SAMPLE > 1 && !(spec->flags & UNFILTERED)) {
        u64 *calls = bpf_map_lookup_elem_(SAMPLED, &id);
        if (calls && (*calls)++ % SAMPLE)
            return 0;
    }
    return 1;
}

static inline int enter(struct pt_regs *ctx, struct frame *frame, u32 id, u32 tid, u32 tgid, u64 served)
{
    struct spec *spec = bpf_map_lookup_elem_(SPECS, &id);
    if (!spec || (!window() && !(spec->flags & NAMES)))
        return 0;
    struct words words = {.stack = STACK(ctx), .in_kernel = spec->flags & IN_KERNEL};
    COPY_REGISTERS(&words, ctx);
    /* A call that does not meet the condition is not what the hook names: it is neither lost nor counted. */
    if (spec->condition && !is_met(spec, word(&words, spec->condition_at)))
        return 0;
    if (!passes(spec, id)) {
        count(FILTERED, spec->layer, spec->flags & INSTANT ? 1 : 2);
        return 0;
    }
    struct open call = {.ts_ns = clock_ns()};
    for (int i = 0; i < 8; i++) {
        if (i < spec->slots) {
            call.a[i] = word(&words, spec->low[i]);
            if (spec->high[i])
                call.a[i] = (u32)call.a[i] | word(&words, spec->high[i]) << 32;
        }
    }
    if (spec->hashed) {
        u64 at = words.stack + 8 * (u64)(spec->hashed_at - 1 - REGISTERS), hash;
        for (int i = 0; i < 8; i++)
            if (i == spec->hashed - 1 && !spec->hashed_at)
                at = call.a[i];
        hash = hash_of(at);
        for (int i = 0; i < 8; i++)
            if (i == spec->hashed - 1)
                call.a[i] = hash;
    }
    if (spec->text)
        call.text = word(&words, spec->text);
    if (spec->flags & PAIRED) {
        if (spec->out)
            call.out = word(&words, spec->out);
        if (bpf_map_update_elem_(OPEN, frame, &call, 0)) {
            count(DROPS, spec->layer, 2);
            return 0;
        }
        if (MIN_DURATION_NS && !(spec->flags & UNFILTERED))
            return 0; /* sent at the return, if it took that long */
    }
    send_entry(spec, &call, served, tid, tgid, id);
    return 0;
}

static inline int leave(struct pt_regs *ctx, struct frame *frame, u32 id, u32 tid, u32 tgid, u64 served)
{
    u64 now_ns = clock_ns(), value = 0;
    u8 torn = 0;
    struct record *r;
    struct spec *spec = bpf_map_lookup_elem_(SPECS, &id);
    u64 begun_ns = window();
    if (!spec || (!begun_ns && !(spec->flags & NAMES)))
        return 0;
    if (spec->flags & PAIRED) {
        struct open *call = bpf_map_lookup_elem_(OPEN, frame);
        if (!call)
            return 0; /* its entry was filtered or lost, and the return was counted with it */
        if (call->ts_ns < begun_ns && !(spec->flags & NAMES)) {
            bpf_map_delete_elem_(OPEN, frame); /* of an earlier window: that call returned between windows */
            return 0;
        }
        if (MIN_DURATION_NS && !(spec->flags & UNFILTERED)) {
            if (now_ns - call->ts_ns < MIN_DURATION_NS) {
                count(FILTERED, spec->layer, 2);
                bpf_map_delete_elem_(OPEN, frame);
                return 0;
            }
            send_entry(spec, call, served, tid, tgid, id);
        }
        u32 bytes = spec->out_bytes;
        if (call->out && bytes && bytes <= sizeof(value)) {
            if (spec->flags & IN_KERNEL)
                bpf_probe_read_kernel(&value, bytes, (void *)call->out);
            else
                bpf_probe_read_user(&value, bytes, (void *)call->out);
        }
        bpf_map_delete_elem_(OPEN, frame);
    }
    if (served) {
        r = reserve(SERVED, tid, tgid, id, now_ns);
        if (r) {
            r->a[0] = served;
            submit(r);
        }
        torn |= !r;
    }
    r = reserve(CALL_RETURN, tid, tgid, id, now_ns);
    if (!r) {
        count(DROPS, spec->layer, 1);
        return 0;
    }
    r->torn = torn;
    r->a[0] = RESULT(ctx);
    r->a[1] = value;
    submit(r);
    return 0;
}

int call_enter(struct pt_regs *ctx)
{
    u64 ids = bpf_get_current_pid_tgid();
    struct thread *thread = current_thread(ids);
    if (!thread)
        return 0;
    struct frame frame = {.at = FRAME_AT_ENTRY(ctx), .tid = (u32)ids};
    return enter(ctx, &frame, (u32)bpf_get_attach_cookie(ctx), (u32)ids, thread->tgid, 0);
}

int call_return(struct pt_regs *ctx)
{
    u32 tid = (u32)bpf_get_current_pid_tgid();
    struct thread *thread = bpf_map_lookup_elem_(TRACKED, &tid);
    if (!thread)
        return 0;
    struct frame frame = {.at = ctx->sp, .tid = tid};
    return leave(ctx, &frame, (u32)bpf_get_attach_cookie(ctx), tid, thread->tgid, 0);
}

/* ── what begins and ends windows: functions of the recorded programs ── */

#define OVER (1ull << 62) /* or-ed to the time: the requested window ended before it had begun */
enum trigger { BEGINS = 1, ENDS = 2 }; /* the lower 16 bits of a cookie; above them is the id of WINDOW */

/* The record precedes all records of its window, or follows them. */
static inline int send_window(u64 begun_ns, u64 now_ns, u32 tid, u32 tgid, u32 id)
{
    struct record *r = reserve(WINDOW, tid, tgid, id, now_ns);
    if (!r) {
        count(DROPS, THREADS, 1);
        return 0;
    }
    r->a[0] = !!begun_ns;
    submit(r);
    return 1;
}

/* Count a hit of what begins windows; returns whether a window is due. */
static inline int is_due(void)
{
    u64 *left = control(WINDOWS_LEFT), *hits = control(BEGIN_HITS);
    if (!left || !*left || !hits)
        return 0;
    __sync_fetch_and_add(hits, 1);
    return *hits >= BEGIN_AT;
}

static inline void begin_window(u64 *begun_ns, u32 tid, u32 tgid, u32 id)
{
    u64 *left = control(WINDOWS_LEFT), *hits = control(BEGIN_HITS), *end_hits = control(END_HITS);
    if (!is_due() || !left || !hits || !end_hits)
        return;
    u64 now_ns = clock_ns();
    if (!send_window(now_ns, now_ns, tid, tgid, id))
        return;
    *hits = *end_hits = 0;
    *left -= 1;
    *begun_ns = now_ns;
}

/* 1 as long as the kernel lets a program loop: `may_goto +1`, from Linux 6.9, written as bytes for older assemblers. */
static inline int may_loop(void)
{
    int may;
    asm volatile("%0 = 0\n.byte 0xe5, 0, 1, 0, 0, 0, 0, 0\n%0 = 1" : "=r"(may) : : "memory");
    return may;
}

/* Takes some time, as the kernel bounds loops: on Linux 6.18 a loop was seen to end after 65535 rounds. */
static inline u64 pause(void)
{
#pragma unroll
    for (int i = 0; i < 127; i++)
        bpf_ktime_get_ns();
    return bpf_ktime_get_ns();
}

/* Request a window, and wait until it has begun. A BPF program cannot sleep until it is woken, so this call spins: for the time
 * that attaching takes, at most HOLD_NS. A capture that has not seen the request after HOLD_UNSEEN_NS, and is not busy,
 * may be waiting for this very processor: most kernels do not preempt a BPF program. */
static inline void await_window(u64 ids)
{
    volatile u64 *asked_ns = control(ASKED_NS), *seen_ns = control(SEEN_NS), *is_busy = control(IS_BUSY);
    u64 *by = control(ASKED_BY), *hits = control(BEGIN_HITS), *end_hits = control(END_HITS);
    if (!asked_ns || *asked_ns || !seen_ns || !is_busy || !is_due() || !by || !hits || !end_hits)
        return;
    u64 began_ns = clock_ns(), now_ns = began_ns;
    *hits = *end_hits = 0;
    *by = ids;
    *asked_ns = began_ns;
    while (may_loop() && *asked_ns == began_ns &&
           now_ns - began_ns < (*seen_ns == began_ns || *is_busy ? HOLD_NS : HOLD_UNSEEN_NS))
        now_ns = pause();
}

/* Wait in the same way at the end of a window, until libraries in the command have ended it too. */
static inline void await_end(void)
{
    volatile u64 *asked_ns = control(END_ASKED_NS);
    if (!asked_ns)
        return;
    u64 began_ns = bpf_ktime_get_ns(), now_ns = began_ns;
    *asked_ns = began_ns;
    while (may_loop() && *asked_ns && now_ns - began_ns < (*asked_ns == began_ns ? HOLD_UNSEEN_NS : HOLD_NS))
        now_ns = pause();
}

static inline void end_window(u64 *begun_ns, u32 tid, u32 tgid, u32 id)
{
    *begun_ns = 0;
    send_window(0, clock_ns(), tid, tgid, id);
}

static inline int turn_window(struct pt_regs *ctx, int holds)
{
    u64 ids = bpf_get_current_pid_tgid(), cookie = bpf_get_attach_cookie(ctx);
    u32 tid = (u32)ids, tgid = ids >> 32, id = (u32)(cookie >> 16);
    if (!current_thread(ids) || is_stopped())
        return 0;
    u64 *begun_ns = control(WINDOW_NS), *hits = control(END_HITS), *asked_ns = control(ASKED_NS);
    u64 *is_ready = control(IS_READY);
    if (!begun_ns || !hits || !asked_ns || !is_ready)
        return 0;
    if (cookie & BEGINS && !*begun_ns) {
        if (holds && (*asked_ns || !*is_ready))
            await_window(ids);
        else
            begin_window(begun_ns, tid, tgid, id);
    }
    if (!(cookie & ENDS) || !(*begun_ns || *asked_ns))
        return 0;
    __sync_fetch_and_add(hits, 1);
    if (*hits < END_AT)
        return 0;
    if (*begun_ns) {
        end_window(begun_ns, tid, tgid, id);
        if (holds)
            await_end();
    } else {
        *asked_ns |= OVER;
    }
    return 0;
}

int trigger(struct pt_regs *ctx)
{
    return turn_window(ctx, 0);
}

/* The same where others have to follow. The call that begins a window waits until probes are attached, unless they are, and
 * the call that ends it waits until libraries in the command have stopped recording. */
int trigger_holding(struct pt_regs *ctx)
{
    return turn_window(ctx, 1);
}

/* ── functions of the kernel; NVIDIA's driver queues work for its own threads ── */

/* Remember what the item will call, and for which thread. NVIDIA's struct nv_kthread_q_item is the same in its open
 * modules 515 to 595 (kernel-open/common/inc/nv-kthread-q.h):
 *
 *    0             16                24              32
 *    ┌─────────────┬─────────────────┬───────────────┐
 *    │ q_list_node │ function_to_run │ function_args │
 *    └─────────────┴─────────────────┴───────────────┘
 */
static inline void remember_item(struct pt_regs *ctx, u64 served)
{
    struct work work = {};
    if (!bpf_probe_read_kernel(&work, sizeof(work), (void *)(SECOND(ctx) + 16)))
        bpf_map_update_elem_(QUEUED, &work, &served, 0);
}

/* The recorded thread for which the current one runs this function; 0 if there is none. */
static inline u64 served_on_entry(struct pt_regs *ctx, u32 tid, u32 id)
{
    struct work work = {};
    struct service *now = bpf_map_lookup_elem_(SERVING, &tid);
    if (now) {
        if (now->id == id)
            now->depth++;
        return now->served;
    }
    work.function = bpf_get_func_ip(ctx);
    work.argument = FIRST(ctx);
    u64 *served = bpf_map_lookup_elem_(QUEUED, &work);
    if (!served || is_stopped())
        return 0;
    struct service started = {.served = *served, .id = id, .depth = 1};
    bpf_map_delete_elem_(QUEUED, &work);
    if (bpf_map_update_elem_(SERVING, &tid, &started, 0)) {
        count(DROPS, KERNEL, 1);
        return 0;
    }
    send_name(THREAD_NAME, tid, tid, 0);
    return started.served;
}

static inline u64 served_on_return(u32 tid, u32 id)
{
    struct service *now = bpf_map_lookup_elem_(SERVING, &tid);
    if (!now)
        return 0;
    u64 served = now->served;
    if (now->id == id && !--now->depth)
        bpf_map_delete_elem_(SERVING, &tid);
    return served;
}

int driver_enter(struct pt_regs *ctx)
{
    u64 ids = bpf_get_current_pid_tgid(), served = 0;
    u32 tid = (u32)ids, tgid = ids >> 32, id = (u32)bpf_get_attach_cookie(ctx);
    if (!window())
        return 0;
    struct thread *thread = current_thread(ids);
    if (!thread) {
        /* 0: the idle threads share this id. Interrupts run on them, but no queue items. */
        served = tid ? served_on_entry(ctx, tid, id) : 0;
        if (!served)
            return 0;
    }
    struct spec *spec = bpf_map_lookup_elem_(SPECS, &id);
    if (spec && spec->flags & QUEUES)
        remember_item(ctx, served ? served : (u64)tgid << 32 | tid);
    struct frame frame = {.at = id, .tid = tid};
    return enter(ctx, &frame, id, tid, tgid, served);
}

int driver_return(struct pt_regs *ctx)
{
    u64 ids = bpf_get_current_pid_tgid(), served = 0;
    u32 tid = (u32)ids, id = (u32)bpf_get_attach_cookie(ctx);
    if (!bpf_map_lookup_elem_(TRACKED, &tid)) {
        served = tid ? served_on_return(tid, id) : 0;
        if (!served)
            return 0;
    }
    struct frame frame = {.at = id, .tid = tid};
    return leave(ctx, &frame, id, tid, ids >> 32, served);
}

/* ── a tracepoint that a hook names: each hook of it has its own copy of this program ── */

enum text_form { NO_TEXT, IN_FIELD, FROM_START, FROM_FIELD };

/* The address of a text, from one of the TEXT constants. */
static inline u64 text_of(void *args, u64 where)
{
    u64 field = (u64)args + (where & 0xffff);
    u32 at = 0;
    if (where >> 16 == IN_FIELD)
        return field;
    bpf_probe_read_kernel(&at, sizeof(at), (void *)field);
    return (where >> 16 == FROM_START ? (u64)args : field + sizeof(at)) + (at & 0xffff);
}

#define SEND_TEXT(where)                                                                                       \
    if (where)                                                                                                 \
    torn |= send_text(text_of(args, where), 1, tid, tgid, id, ts_ns)

int tracepoint_hit(void *args)
{
    u32 id = 0, number = 0;
    u64 ids = bpf_get_current_pid_tgid();
    struct spec *spec = 0;
    if (!window())
        return 0;
    u64 a[4] = {FIELD(u64, 32), FIELD(u64, 33), FIELD(u64, 34), FIELD(u64, 35)};
    for (; number < PROBES; number++) {
        id = (u32)PROBE + number;
        spec = bpf_map_lookup_elem_(SPECS, &id);
        if (!spec)
            return 0;
        u32 at = spec->condition_at;
        if (!spec->condition || is_met(spec, at == 1 ? a[0] : at == 2 ? a[1] : at == 3 ? a[2] : a[3]))
            break;
    }
    if (!spec || number == PROBES)
        return 0;
    int everywhere = spec->flags & EVERYWHERE;
    if (everywhere ? is_stopped() : !current_thread(ids))
        return 0;
    if (SAMPLE > 1) {
        u64 *hits = bpf_map_lookup_elem_(SAMPLED, &id);
        if (hits && (*hits)++ % SAMPLE) {
            count(FILTERED, spec->layer, 1);
            return 0;
        }
    }
    u32 tid = everywhere ? 0 : (u32)ids, tgid = everywhere ? 0 : ids >> 32;
    u64 ts_ns = clock_ns();
    u8 torn = 0;
    SEND_TEXT(TEXT_0);
    SEND_TEXT(TEXT_1);
    SEND_TEXT(TEXT_2);
    SEND_TEXT(TEXT_3);
    struct record *r = reserve(EVENT, tid, tgid, id, ts_ns);
    if (!r) {
        count(DROPS, spec->layer, 1);
        return 0;
    }
    r->torn = torn;
    r->a[0] = a[0];
    r->a[1] = a[1];
    r->a[2] = a[2];
    r->a[3] = a[3];
    submit(r);
    return 0;
}

/* ── syscall ── */

/* Numbers above the table include −1 as unsigned: a call that ptrace or seccomp cancelled. */
static inline int is_wanted(u64 number)
{
    u32 key = (u32)number;
    if (number >= 512)
        return 0;
    u64 *flag = bpf_map_lookup_elem_(WANTED, &key);
    return flag && *flag;
}

static inline void send_syscall(u64 ids, u32 tgid, u32 number, u64 ts_ns, u64 *a)
{
    struct record *r = reserve(SYSCALL_ENTER, (u32)ids, tgid, number, ts_ns);
    if (!r) {
        count(DROPS, SYSCALL, 1);
        return;
    }
    r->a[0] = a[0];
    r->a[1] = a[1];
    r->a[2] = a[2];
    r->a[3] = a[3];
    submit(r);
}

/* Raw tracepoints pass the registers, and the number or the result. While a program of another kind of tracepoint or
 * of a kprobe runs on a processor, the kernel runs no program for a wakeup by an interrupt there. Programs of raw
 * tracepoints do not have this effect, and there may be a million system calls a second. */
#define REGISTERS_OF(given) (((u64 *)(given))[0])
#define VALUE_OF(given) (((u64 *)(given))[1])

#if defined(TRACEPIPE_X86_64)
/* The order of struct pt_regs: r10 r9 r8 ax cx dx si di. */
static inline int read_arguments(u64 registers, u64 *a)
{
    u64 words[8] = {};
    if (bpf_probe_read_kernel(words, sizeof(words), &((struct pt_regs *)registers)->r10))
        return -1;
    a[0] = words[7];
    a[1] = words[6];
    a[2] = words[5];
    a[3] = words[0];
    return 0;
}

static inline u64 number_of(u64 registers)
{
    u64 number = -1;
    bpf_probe_read_kernel(&number, sizeof(number), &((struct pt_regs *)registers)->orig_ax);
    return number;
}
#elif defined(TRACEPIPE_AARCH64)
static inline int read_arguments(u64 registers, u64 *a)
{
    return bpf_probe_read_kernel(a, 4 * sizeof(*a), (void *)registers);
}

/* arch/arm64/include/asm/ptrace.h, since 4.15: the registers that programs see, orig_x0, then s32 syscallno. */
static inline u64 number_of(u64 registers)
{
    int number = -1;
    void *at = (void *)(registers + sizeof(struct pt_regs) + 8);
    bpf_probe_read_kernel(&number, sizeof(number), at);
    return (u64)(long)number;
}
#endif

int syscall_enter(void *given)
{
    u64 ids = bpf_get_current_pid_tgid();
    if (!window())
        return 0;
    struct thread *thread = current_thread(ids);
    if (!thread)
        return 0;
    u64 number = VALUE_OF(given), registers = REGISTERS_OF(given);
    if (!is_wanted(number))
        return 0;
    struct open call = {.ts_ns = clock_ns()};
    read_arguments(registers, call.a);
    if (MIN_DURATION_NS) {
        struct frame frame = {.at = -1, .tid = (u32)ids};
        if (bpf_map_update_elem_(OPEN, &frame, &call, 0))
            count(DROPS, SYSCALL, 2);
        return 0;
    }
    send_syscall(ids, thread->tgid, (u32)number, call.ts_ns, call.a);
    return 0;
}

int syscall_exit(void *given)
{
    u64 ids = bpf_get_current_pid_tgid();
    if (!window())
        return 0;
    struct thread *thread = current_thread(ids);
    if (!thread)
        return 0;
    u64 result = VALUE_OF(given), number = number_of(REGISTERS_OF(given));
    if (!is_wanted(number))
        return 0;
    if (MIN_DURATION_NS) {
        struct frame frame = {.at = -1, .tid = (u32)ids};
        struct open *call = bpf_map_lookup_elem_(OPEN, &frame);
        if (!call)
            return 0;
        u64 began_ns = call->ts_ns, a[4] = {call->a[0], call->a[1], call->a[2], call->a[3]};
        bpf_map_delete_elem_(OPEN, &frame);
        if (clock_ns() - began_ns < MIN_DURATION_NS) {
            count(FILTERED, SYSCALL, 2);
            return 0;
        }
        send_syscall(ids, thread->tgid, (u32)number, began_ns, a);
    }
    struct record *r = new_record(SYSCALL, SYSCALL_EXIT, (u32)ids, thread->tgid, (u32)number);
    if (!r)
        return 0;
    r->a[0] = result;
    submit(r);
    return 0;
}

/* ── scheduler ── */

#define PREEMPTED 0x100 /* in prev_state: it left its processor, but not to wait */

/* Count the events that must have happened as the thread runs again: a wakeup if it waited, a migration if it runs
 * elsewhere. The kernel runs no program for those in interrupts of perf, and of another program. */
static inline void count_unseen(struct thread *thread)
{
    u64 here = 1 + bpf_get_smp_processor_id();
    u64 unseen = thread->asleep + (thread->queued_on && thread->queued_on != here);
    if (unseen && WITH_SAMPLES != 2)
        count(DROPS, UNSEEN, unseen);
}

/* The tracepoint fires while the leaving thread is still the current one. */
int sched_switch(void *args)
{
    u32 prev = FIELD(u32, 4), next = FIELD(u32, 5);
    u64 state = FIELD(u64, 6), begun_ns = window();
    /* EXIT_DEAD or EXIT_ZOMBIE as the tracepoint shows them: the thread will not run again. */
    int ends = !!(state & 0x30);
    struct thread *thread = prev && (begun_ns || ends) ? current_thread(bpf_get_current_pid_tgid()) : 0;
    if (thread) {
        if (thread->window_ns != begun_ns) {
            thread->running = 2;
            thread->window_ns = begun_ns;
        }
        u64 stack = WITH_SAMPLES && begun_ns && !ends ? send_stack(args, thread, prev, thread->tgid) : 0;
        struct record *r = new_record(SCHEDULER, SWITCH_OUT, prev, thread->tgid, 0);
        if (r) {
            r->a[0] = state;
            r->a[1] = thread->running == 0 ? 1 : thread->running == 2 ? 2 : 0;
            r->a[2] = stack;
            submit(r);
        }
        thread->running = 0;
        thread->woken_by = 0;
        thread->asleep = state && !(state & PREEMPTED);
        thread->queued_on = 1 + bpf_get_smp_processor_id();
        if (ends)
            bpf_map_delete_elem_(TRACKED, &prev);
    }
    thread = begun_ns ? bpf_map_lookup_elem_(TRACKED, &next) : 0;
    if (thread) {
        if (thread->window_ns == begun_ns)
            count_unseen(thread);
        thread->asleep = thread->queued_on = 0;
        struct record *r = new_record(SCHEDULER, SWITCH_IN, next, thread->tgid, 0);
        if (r) {
            r->a[1] = thread->running == 1 && thread->window_ns == begun_ns;
            r->a[2] = thread->woken_by;
            submit(r);
        }
        thread->running = 1;
        thread->window_ns = begun_ns;
    }
    return 0;
}

int sched_wakeup(void *args)
{
    u32 tid = FIELD(u32, 7);
    struct thread *thread = window() ? bpf_map_lookup_elem_(TRACKED, &tid) : 0;
    if (!thread)
        return 0;
    thread->asleep = 0;
    struct record *r = new_record(SCHEDULER, WAKEUP, tid, thread->tgid, (u32)bpf_get_current_pid_tgid());
    if (!r)
        return 0;
    r->a[0] = FIELD(u32, 8);
    submit(r);
    return 0;
}

/* It fires where the waker runs, which sched_wakeup need not do. */
int sched_waking(void *args)
{
    u32 tid = FIELD(u32, 17);
    struct thread *thread = window() ? bpf_map_lookup_elem_(TRACKED, &tid) : 0;
    if (thread)
        thread->woken_by = 1 + (u64)(u32)bpf_get_current_pid_tgid();
    return 0;
}

int sched_migrate(void *args)
{
    u32 tid = FIELD(u32, 9);
    struct thread *thread = window() ? bpf_map_lookup_elem_(TRACKED, &tid) : 0;
    if (!thread)
        return 0;
    if (thread->queued_on)
        thread->queued_on = 1 + FIELD(u32, 11);
    struct record *r = new_record(SCHEDULER, MIGRATE, tid, thread->tgid, 0);
    if (!r)
        return 0;
    r->a[0] = FIELD(u32, 10);
    r->a[1] = FIELD(u32, 11);
    submit(r);
    return 0;
}

/* ── threads: found at exec, followed through clone, forgotten at their end ── */

/* Whether this exec is the one that the capture waits for. */
static inline int is_armed(u64 ids)
{
    u32 tgid = ids >> 32;
    u64 *armed = control(ARMED);
    if (!armed || !*armed)
        return 0;
    if (NAMESPACE_INO) {
        struct namespace_ids here = {};
        if (bpf_get_ns_current_pid_tgid(NAMESPACE_DEV, NAMESPACE_INO, (void *)&here, sizeof(here)))
            return 0;
        tgid = here.tgid;
    }
    if (*armed != (u64)tgid + 1)
        return 0;
    *armed = 0;
    return 1;
}

static inline int has_the_name(void)
{
    u64 comm[2] = {};
    if (!COMM_LOW)
        return 0;
    bpf_get_current_comm(comm, sizeof(comm));
    return comm[0] == COMM_LOW && comm[1] == COMM_HIGH;
}

/* Report the end of the thread that had this id, as no switch has shown it. */
static inline void send_end(u32 tid, u32 tgid)
{
    struct thread *thread = bpf_map_lookup_elem_(TRACKED, &tid);
    if (!thread)
        return;
    int ran = thread->running == 1 && thread->window_ns && thread->window_ns == window();
    struct record *r = WITH_SCHEDULER && ran ? new_record(SCHEDULER, SWITCH_OUT, tid, tgid, 0) : 0;
    if (r) {
        r->a[0] = 0x10; /* EXIT_DEAD */
        submit(r);
    }
    bpf_map_delete_elem_(TRACKED, &tid);
}

int process_exec(void *args)
{
    u64 ids = bpf_get_current_pid_tgid();
    u32 tid = (u32)ids, old_tid = FIELD(u32, 12);
    struct thread *thread = bpf_map_lookup_elem_(TRACKED, &tid);
    if (!thread)
        thread = bpf_map_lookup_elem_(TRACKED, &old_tid);
    if (is_stopped())
        return 0;
    u32 tgid = ids >> 32;
    bpf_map_delete_elem_(PYTHONS, &tgid); /* it is another program now */
    int starts = !thread && (is_armed(ids) || has_the_name() || (EVERYONE && ids >> 32 != OWN_TGID));
    if (!thread && !starts)
        return 0;
    /* A thread other than the leader that calls exec takes over the leader's id; its own id is gone. The leader may have
       left its processor after that, under the id that is gone. */
    if (old_tid != tid) {
        send_end(old_tid, ids >> 32);
        send_end(tid, ids >> 32);
    }
    if (starts || old_tid != tid)
        track(tid, ids >> 32, 1);
    current_thread(ids);
    send_name(THREAD_NAME, tid, ids >> 32, 0);
    if (starts || old_tid != tid)
        send_running(tid, ids >> 32);
    return 0;
}

int thread_new(void *args)
{
    u64 ids = bpf_get_current_pid_tgid();
    u32 creator = (u32)ids, tid = FIELD(u32, 13), is_thread = FIELD(u64, 14) & CLONE_THREAD;
    struct thread *thread = current_thread(ids);
    if (is_stopped())
        return 0;
    if ((!thread && (!EVERYONE || ids >> 32 == OWN_TGID)) || (!is_thread && !CHILDREN)) {
        /* A thread that had this id may have ended unseen, right after a window. */
        bpf_map_delete_elem_(TRACKED, &tid);
        return 0;
    }
    u32 tgid = is_thread ? ids >> 32 : tid, creators = ids >> 32;
    struct python *python = is_thread ? 0 : bpf_map_lookup_elem_(PYTHONS, &creators);
    if (python) { /* a fork has it at the same addresses */
        struct python same = *python;
        bpf_map_update_elem_(PYTHONS, &tgid, &same, 0);
    }
    bpf_map_delete_elem_(STATES, &tid); /* of a thread that had this id */
    track(tid, tgid, 0);
    send_name(THREAD_NEW, tid, tgid, creator);
    return 0;
}

/* A thread names itself or another thread of its process; the tracepoint's field has the named one. */
int thread_rename(void *args)
{
    u32 tid = FIELD(u32, 15);
    struct thread *thread = bpf_map_lookup_elem_(TRACKED, &tid);
    if (!thread)
        return 0;
    struct record *r = new_record(THREADS, THREAD_NAME, tid, thread->tgid, 0);
    if (!r)
        return 0;
    /* Four-byte reads: the field is not aligned to eight. */
    u32 *name = (u32 *)&r->a[0];
    name[0] = FIELD_AT(u32, 16, 0);
    name[1] = FIELD_AT(u32, 16, 4);
    name[2] = FIELD_AT(u32, 16, 8);
    name[3] = FIELD_AT(u32, 16, 12);
    submit(r);
    return 0;
}

/* Where the scheduler layer is recorded, the last switch of a thread comes later than this. This program is then attached
 * only with windows, as no switches are seen between them. */
int process_exit(void *args)
{
    u32 tid = (u32)bpf_get_current_pid_tgid();
    struct thread *thread = bpf_map_lookup_elem_(TRACKED, &tid);
    if (!thread || (WITH_SCHEDULER && window()))
        return 0;
    /* Not counted where the ring is full: the thread's state is then kept until its id is used again. */
    struct record *r = reserve(THREAD_END, tid, thread->tgid, 0, clock_ns());
    if (r)
        submit(r);
    bpf_map_delete_elem_(TRACKED, &tid);
    return 0;
}
