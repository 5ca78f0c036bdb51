// The device code that Compute Sanitizer calls at every block entry and exit of a patched kernel.
//
// It runs for each thread; the lowest active lane of a warp writes for all. Whatever the kernel does, the
// patch touches nothing but the launch's region, and nothing at all where a launch has none.
// Built with  nvcc --fatbin --compile-as-tools-patch.
#include <sanitizer_patching.h>

#include "warp_record.h"

using tracepipe::Exit;
using tracepipe::Region;
using tracepipe::Warp;

namespace {

__device__ __forceinline__ uint64_t globaltimer() {
    uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}
__device__ __forceinline__ uint32_t lane_id() {
    uint32_t id;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(id));
    return id;
}
__device__ __forceinline__ uint32_t place() {
    uint32_t sm, slot;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    asm volatile("mov.u32 %0, %%warpid;" : "=r"(slot));
    return sm | slot << 16;
}

struct Position {
    uint64_t warp, warps;  // of the grid
    uint32_t lanes;        // that this warp has, as a mask
};
__device__ __forceinline__ Position position() {
    uint32_t threads = blockDim.x * blockDim.y * blockDim.z;
    uint32_t thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    uint32_t a_block = (threads + 31) / 32, in_block = thread / 32, rest = threads - in_block * 32;
    uint64_t block = blockIdx.x + uint64_t(gridDim.x) * (blockIdx.y + uint64_t(gridDim.y) * blockIdx.z);
    uint64_t blocks = uint64_t(gridDim.x) * gridDim.y * gridDim.z;
    return {block * a_block + in_block, blocks * a_block, rest >= 32 ? ~0u : (1u << rest) - 1};
}
// Warps that have room; none in the data of another launch.
__device__ __forceinline__ uint64_t recorded(uint64_t warps, uint64_t data) {
    if (data >> tracepipe::CHECK_SHIFT != tracepipe::check_of(warps)) return 0;
    uint64_t bits = data & tracepipe::LIMIT_BITS;
    return bits && (uint64_t(1) << bits) < warps ? uint64_t(1) << bits : warps;
}

}  // namespace

extern "C" __device__ __noinline__ SanitizerPatchResult tracepipe_enter(void *userdata, uint64_t) {
#ifndef TRACEPIPE_EMPTY
    uint32_t mask = __activemask();
    if (!userdata || lane_id() != __ffs(mask) - 1) return SANITIZER_PATCH_SUCCESS;
    Position at = position();
    uint64_t data = uint64_t(userdata);
    if (at.warp >= recorded(at.warps, data)) return SANITIZER_PATCH_SUCCESS;
    char *region = reinterpret_cast<char *>(data << 16 >> 16 & ~(tracepipe::REGION_ALIGNMENT - 1));
    Warp *warp = reinterpret_cast<Warp *>(region + sizeof(Region)) + at.warp;
    *reinterpret_cast<uint2 *>(&warp->place) = make_uint2(place(), mask);
    *reinterpret_cast<ulonglong2 *>(&warp->entry_ns) = make_ulonglong2(globaltimer(), clock64());
#endif
    return SANITIZER_PATCH_SUCCESS;
}

extern "C" __device__ __noinline__ SanitizerPatchResult tracepipe_exit(void *userdata, uint64_t) {
#ifndef TRACEPIPE_EMPTY
    uint32_t mask = __activemask();
    if (!userdata || lane_id() != __ffs(mask) - 1) return SANITIZER_PATCH_SUCCESS;
    uint64_t clk = clock64(), ns = globaltimer();
    Position at = position();
    uint64_t data = uint64_t(userdata), warps = recorded(at.warps, data);
    if (at.warp >= warps) return SANITIZER_PATCH_SUCCESS;
    char *region = reinterpret_cast<char *>(data << 16 >> 16 & ~(tracepipe::REGION_ALIGNMENT - 1));
    Warp *warp = reinterpret_cast<Warp *>(region + sizeof(Region)) + at.warp;
    if (mask != at.lanes && atomicCAS(&warp->partial_mask, 0u, mask) != 0) {
        uint32_t index = atomicAdd(&reinterpret_cast<Region *>(region)->exits, 1u);
        if (index < tracepipe::exits_room(warps, data >> tracepipe::ROOM_SHIFT & tracepipe::MOST_ROOM)) {
            Exit *exit = reinterpret_cast<Exit *>(region + tracepipe::exits_offset(warps)) + index;
            exit->warp = at.warp;
            exit->mask = mask;
            *reinterpret_cast<ulonglong2 *>(&exit->exit_ns) = make_ulonglong2(ns, clk);
        }
        return SANITIZER_PATCH_SUCCESS;
    }
    *reinterpret_cast<ulonglong2 *>(&warp->exit_ns) = make_ulonglong2(ns, clk);
#endif
    return SANITIZER_PATCH_SUCCESS;
}
