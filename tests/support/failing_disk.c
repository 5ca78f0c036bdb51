/* Preloaded into a capture: reads of its temporary files fail from the Nth on, as those of a disk that breaks. $FAIL_FROM is
 * N; $FAIL_BYTES the least size of reads that count.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int is_temporary(int file)
{
    char link[64], name[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, name, sizeof name - 1);
    name[size < 0 ? 0 : size] = 0;
    return strstr(name, " (deleted)") != NULL;
}

ssize_t pread64(int file, void *to, size_t size, off64_t offset)
{
    static int reads;
    const char *from = getenv("FAIL_FROM"), *least = getenv("FAIL_BYTES");
    if (from && size >= (least ? strtoul(least, NULL, 10) : 0) && is_temporary(file)
        && __atomic_add_fetch(&reads, 1, __ATOMIC_RELAXED) >= atoi(from)) {
        errno = EIO;
        return -1;
    }
    ssize_t (*next)(int, void *, size_t, off64_t) = (ssize_t(*)(int, void *, size_t, off64_t))dlsym(RTLD_NEXT, "pread64");
    return next(file, to, size, offset);
}
