// What one launch of the copy kernel is told, as 64-bit words in device memory: the host writes them
// (kv_exchange.cpp), kv_exchange_kernel.cpp reads them. Addresses are the device's; strides are bytes.
#pragma once

#include <cstdint>

namespace hicache {

// The first words. Groups follow, then what they point to by word offset.
enum HeaderWord : int64_t {
  kDstIndices,      // address
  kDstIndexStride,  // elements
  kDstIsInt64,
  kSrcIndices,
  kSrcIndexStride,
  kSrcIsInt64,
  kCount,  // address of how many entries move; 0: all of them
  kCountIsInt64,
  kNumEntries,
  kDstSlots,
  kSrcSlots,
  kErrorRecord,  // address of one ErrorLine pair a core; 0: the host has checked the indices
  kErrorCores,   // how many cores it holds
  kCall,         // a number for the text of an error
  kBufferBytes,  // of each of the two buffers in the unified buffer
  kNumGroups,
  kHeaderWords,
};

// One PlaneGroup of transfer_kv.h.
enum GroupWord : int64_t {
  kChunkBytes,
  kDstSlotStride,
  kSrcSlotStride,
  kNumLoops,
  kLoopsAt,
  kNumPlanes,
  kPlanesAt,
  kGroupWords,
};
enum LoopWord : int64_t { kLoopSize, kLoopDstStride, kLoopSrcStride, kLoopWords };
enum PlaneWord : int64_t { kPlaneDst, kPlaneSrc, kPlaneWords };

// What a core reports: a line that says whether it has reported since the host last cleared all of them, and
// behind the lines of all cores, one with the first bad entry. A line has one writer, so cores never share one.
constexpr int64_t kErrorLineBytes = 64;
enum ErrorWord : int64_t {
  kErrorSequence,  // counts this core's reports, for ever: the host has seen those up to a number
  kErrorWhat,      // BadValue
  kErrorCall,
  kErrorPosition,
  kErrorValue,
  kErrorLimit,
  kErrorWords = kErrorLineBytes / 8,
};
enum BadValue : int64_t { kBadDstIndex, kBadSrcIndex, kBadCount };

}  // namespace hicache
