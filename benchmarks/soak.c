/* A load that counts what a capture of it must show: the program of soak.py.
 *
 *   soak SECONDS THREADS RATE     threads that call `turn`, all together at RATE calls a second, 0: as fast as
 *                                 they go; prints {"calls":N,"calls_a_second":N}
 *   soak                          prints whether a breakpoint is on `turn`: {"probed":0}
 *
 * With it one thread makes a child in every tenth of a second, which ends at once: a capture must forget both.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static atomic_int over;
static double period_ns;
static int threads;
static int64_t start_ns;

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Its first instruction is a nop, which the kernel emulates where it has put a probe. */
__attribute__((noinline, patchable_function_entry(1))) uint64_t turn(uint64_t n)
{
    __asm__ volatile(""); /* or the compiler takes it apart */
    return n;
}

static void *call(void *argument)
{
    long index = (long)argument, made = 0;
    for (; !over; made++) {
        if (period_ns) {
            int64_t due_ns = start_ns + (int64_t)((double)(made * threads + index) * period_ns);
            int64_t early_ns = due_ns - now_ns();
            if (early_ns > 0)
                nanosleep(&(struct timespec){.tv_nsec = early_ns % 1000000000}, NULL);
        }
        turn((uint64_t)made);
    }
    return (void *)made;
}

int main(int argc, char **argv)
{
    if (argc < 4) {
        unsigned char breakpoint = 0xCC; /* int3 of x86-64; a probe of aarch64 is not looked for */
        return printf("{\"probed\":%d}\n", *(volatile unsigned char *)turn == breakpoint) < 0;
    }
    int64_t length_ns = (int64_t)(atof(argv[1]) * 1e9);
    double rate = atof(argv[3]);
    threads = atoi(argv[2]);
    period_ns = rate > 0 ? 1e9 / rate : 0;
    start_ns = now_ns();
    pthread_t made[threads];
    for (long i = 0; i < threads; i++)
        if (pthread_create(&made[i], NULL, call, (void *)i))
            abort();
    while (now_ns() - start_ns < length_ns) {
        pid_t child = fork();
        if (child == 0)
            _exit(0);
        if (child < 0 || waitpid(child, NULL, 0) != child)
            abort();
        nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    }
    over = 1;
    uint64_t calls = 0;
    for (int i = 0; i < threads; i++) {
        void *result;
        pthread_join(made[i], &result);
        calls += (uint64_t)(uintptr_t)result;
    }
    double taken_s = (double)(now_ns() - start_ns) / 1e9;
    return printf("{\"calls\":%llu,\"calls_a_second\":%.0f}\n", (unsigned long long)calls, (double)calls / taken_s) < 0;
}
