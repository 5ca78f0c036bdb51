/* Memory that runs out when a test asks for it: included before every file of the sanitized core. */
#ifndef FAILING_MEMORY_H
#define FAILING_MEMORY_H

#include <stdlib.h>

/* So many allocations succeed from now on; below 0 all do. */
__attribute__((weak, visibility("default"))) long allocations_left = -1;

static inline int is_out_of_memory(void)
{
    if (allocations_left > 0)
        allocations_left--;
    return allocations_left == 0;
}

static inline void *failing_malloc(size_t size)
{
    return is_out_of_memory() ? NULL : malloc(size);
}

static inline void *failing_calloc(size_t count, size_t size)
{
    return is_out_of_memory() ? NULL : calloc(count, size);
}

static inline void *failing_realloc(void *old, size_t size)
{
    return is_out_of_memory() ? NULL : realloc(old, size);
}

#define malloc failing_malloc
#define calloc failing_calloc
#define realloc failing_realloc

#endif
