#include <tracepipe/mark.h>

__global__ void second(float *out) {
    TRACEPIPE_MARK_SCOPE(second);
    out[32] = 5;
}
void second_module(float *out) { second<<<1, 32>>>(out); }
