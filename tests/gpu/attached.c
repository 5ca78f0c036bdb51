// A program that a library is loaded into while it does what its argument says. It says `begun` first, and how that
// ended. With -DLIBRARY it is that library, whose entry writes a line to the file that it is given.
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

#ifdef LIBRARY
int entry(const char *path) {
    FILE *file = fopen(path, "a");
    if (!file) return errno;
    fputs("called\n", file);
    fclose(file);
    return 42;
}
#else

static volatile char sink;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}
// Until a line comes: memory is taken and given back all the time, and sums are computed in vector registers.
static int is_over;
static void *work(void *unused) {
    (void)unused;
    double x[8] = {1, 2, 3, 4, 5, 6, 7, 8}, y[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    for (unsigned long at = 0; !__atomic_load_n(&is_over, __ATOMIC_RELAXED); at++) {
        char *memory = malloc(at % 5000 + 1);
        memory[0] = 1;
        sink = memory[0];
        free(memory);
        for (int k = 0; k < 8; k++) x[k] = x[k] * 1.0000001, y[k] = y[k] * 1.0000001;
        if (memcmp(x, y, sizeof x)) puts("wrong"), exit(1);
    }
    return NULL;
}
static void *wait_for_line(void *unused) {
    getchar();
    __atomic_store_n(&is_over, 1, __ATOMIC_RELAXED);
    return unused;
}
static void on_signal(int number) { (void)number; }

int main(int count, char **arguments) {
    const char *what = count > 1 ? arguments[1] : "";
    puts("begun");
    fflush(stdout);
    errno = 0;
    double begin = now();
    if (!strcmp(what, "nanosleep")) {
        struct timespec two = {2, 0};
        int result = nanosleep(&two, NULL);
        printf("%d after %.0f s, errno %d\n", result, now() - begin, errno);
    } else if (!strcmp(what, "epoll_wait")) {
        struct epoll_event event;
        int result = epoll_wait(epoll_create1(0), &event, 1, 2000);
        printf("%d, errno %d\n", result, errno);
    } else if (!strcmp(what, "read")) {
        char text[10];
        ssize_t result = read(0, text, sizeof text);
        printf("%zd, errno %d\n", result, errno);
    } else if (!strcmp(what, "pause")) {
        signal(SIGUSR1, on_signal);
        int result = pause();
        printf("%d, interrupted %d\n", result, errno == EINTR);
    } else if (!strcmp(what, "condition")) {
        pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
        pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += 2;
        pthread_mutex_lock(&mutex);
        int result = 0;
        while (!result) result = pthread_cond_timedwait(&condition, &mutex, &until);
        printf("timed out %d\n", result == ETIMEDOUT);
    } else if (!strcmp(what, "work") || !strcmp(what, "threads")) {
        pthread_t threads[4], reader;
        pthread_create(&reader, NULL, wait_for_line, NULL);
        int more = strcmp(what, "work") ? 3 : 0;
        for (int at = 0; at < more; at++) pthread_create(&threads[at], NULL, work, NULL);
        work(NULL);
        for (int at = 0; at < more; at++) pthread_join(threads[at], NULL);
        printf("worked, errno %d\n", errno);
    }
}
#endif
