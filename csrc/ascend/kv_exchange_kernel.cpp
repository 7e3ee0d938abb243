// The copy kernel for AI-vector cores, in AscendC: any rows between device memory and host memory that has a
// device address. One source for CANN's compiler and for the emulation in test/ascend_emulation.
//
//   source row --MTE2--> unified buffer --MTE3--> destination row
//
// The work is strips (planes x loops x parts of a long chunk) x entries, cut evenly among the cores. A core
// gathers rows into one of two buffers while the other is written out. Neighbouring slots become one transfer.
#include "kernel_operator.h"
#include "kv_exchange_params.h"

namespace hicache {

using Buffer = AscendC::LocalTensor<uint8_t>;

constexpr int64_t kBlockBytes = 32;  // granule of the unified buffer
constexpr int64_t kMaxRows = 4095;   // blockCount of one transfer
constexpr int64_t kMaxGapBytes = 0xFFFFFFFF;
constexpr int32_t kMaxPieces = 64;  // transfers in one buffer
constexpr int32_t kBuffers = 2;

__aicore__ inline int64_t RoundUp(int64_t bytes) {
  return (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
}

__aicore__ inline int64_t Min(int64_t a, int64_t b) {
  return a < b ? a : b;
}

// Rows that one transfer moves on either side: `rows` times `row_bytes`, with gaps between them.
struct Piece {
  uint64_t dst;
  uint64_t src;
  int64_t row_bytes;
  int64_t rows;
  int64_t dst_gap;
  int64_t src_gap;
  int64_t offset;  // in the buffer
};

// The part of a group that all entries repeat.
struct Strip {
  uint64_t dst;
  uint64_t src;
  int64_t row_bytes;
  int64_t dst_stride;
  int64_t src_stride;
  bool is_joined;    // neighbouring slots are neighbouring bytes on both sides
  int64_t max_rows;  // of one transfer
};

class KvExchange {
 public:
  __aicore__ inline void Init(GM_ADDR params, AscendC::TPipe* pipe) {
    words_.SetGlobalBuffer(reinterpret_cast<__gm__ int64_t*>(params));
    buffer_bytes_ = Word(kBufferBytes);
    num_entries_ = Word(kNumEntries);
    dst_slots_ = Word(kDstSlots);
    src_slots_ = Word(kSrcSlots);
    dst_stride_ = Word(kDstIndexStride);
    src_stride_ = Word(kSrcIndexStride);
    dst_is_int64_ = Word(kDstIsInt64) != 0;
    src_is_int64_ = Word(kSrcIsInt64) != 0;
    reports_ = Word(kErrorRecord) != 0 && AscendC::GetBlockIdx() < Word(kErrorCores);
    Bind(dst64_, dst32_, Word(kDstIndices));
    Bind(src64_, src32_, Word(kSrcIndices));
    pipe->InitBuffer(queue_, kBuffers, static_cast<uint32_t>(buffer_bytes_));
    pipe->InitBuffer(error_buffer_, static_cast<uint32_t>(2 * kErrorLineBytes));
    ReadCount();
  }

  __aicore__ inline void Run() {
    const int64_t num_groups = Word(kNumGroups);
    for (int64_t group = 0; group < num_groups; ++group)
      CopyGroup(group);
    Finish();
    if (has_error_)
      WriteError();
  }

 private:
  __aicore__ inline int64_t Word(int64_t at) {
    return words_.GetValue(at);
  }

  __aicore__ inline void Bind(AscendC::GlobalTensor<int64_t>& wide, AscendC::GlobalTensor<int32_t>& narrow,
                              int64_t address) {
    wide.SetGlobalBuffer(reinterpret_cast<__gm__ int64_t*>(address));
    narrow.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(address));
  }

  __aicore__ inline void ReadCount() {
    const int64_t address = Word(kCount);
    if (address == 0)
      return;
    AscendC::GlobalTensor<int64_t> wide;
    AscendC::GlobalTensor<int32_t> narrow;
    Bind(wide, narrow, address);
    const int64_t count = Word(kCountIsInt64) != 0 ? wide.GetValue(0) : narrow.GetValue(0);
    if ((count < 0 || count > num_entries_) && AscendC::GetBlockIdx() == 0)
      Report(kBadCount, -1, count, num_entries_);
    num_entries_ = count < 0 ? 0 : Min(count, num_entries_);
  }

  // --- Which rows -------------------------------------------------------------------------------

  __aicore__ inline void CopyGroup(int64_t group) {
    const int64_t at = kHeaderWords + group * kGroupWords;
    const int64_t chunk_bytes = Word(at + kChunkBytes);
    const int64_t parts = (chunk_bytes + buffer_bytes_ - 1) / buffer_bytes_;
    const int64_t num_loops = Word(at + kNumLoops);
    const int64_t loops_at = Word(at + kLoopsAt);
    int64_t chunks = 1;
    for (int64_t k = 0; k < num_loops; ++k)
      chunks *= Word(loops_at + k * kLoopWords + kLoopSize);
    const int64_t strips = Word(at + kNumPlanes) * chunks * parts;
    const int64_t items = strips * num_entries_;
    const int64_t cores = AscendC::GetBlockNum(), core = AscendC::GetBlockIdx();
    const int64_t share = items / cores, extra = items % cores;
    int64_t begin = core * share + Min(core, extra);
    int64_t left = share + (core < extra ? 1 : 0);
    while (left > 0) {
      const int64_t number = begin / num_entries_, first = begin % num_entries_;
      const int64_t count = Min(left, num_entries_ - first);
      Strip strip;
      LocateStrip(strip, at, number, parts, chunks, num_loops, loops_at);
      CopyStrip(strip, first, first + count, reports_ && group == 0 && number == 0);
      begin += count;
      left -= count;
    }
  }

  __aicore__ inline void LocateStrip(Strip& strip, int64_t at, int64_t number, int64_t parts, int64_t chunks,
                                     int64_t num_loops, int64_t loops_at) {
    const int64_t chunk_bytes = Word(at + kChunkBytes);
    const int64_t first_byte = number % parts * buffer_bytes_;
    int64_t chunk = number / parts;
    const int64_t plane_at = Word(at + kPlanesAt) + chunk / chunks * kPlaneWords;
    strip.dst = static_cast<uint64_t>(Word(plane_at + kPlaneDst) + first_byte);
    strip.src = static_cast<uint64_t>(Word(plane_at + kPlaneSrc) + first_byte);
    strip.row_bytes = Min(buffer_bytes_, chunk_bytes - first_byte);
    strip.dst_stride = Word(at + kDstSlotStride);
    strip.src_stride = Word(at + kSrcSlotStride);
    chunk %= chunks;
    for (int64_t k = num_loops - 1; k >= 0; --k) {
      const int64_t loop_at = loops_at + k * kLoopWords;
      const int64_t size = Word(loop_at + kLoopSize), i = chunk % size;
      strip.dst += static_cast<uint64_t>(i * Word(loop_at + kLoopDstStride));
      strip.src += static_cast<uint64_t>(i * Word(loop_at + kLoopSrcStride));
      chunk /= size;
    }
    const int64_t dst_gap = strip.dst_stride - strip.row_bytes, src_gap = strip.src_stride - strip.row_bytes;
    strip.is_joined = parts == 1 && dst_gap == 0 && src_gap == 0;
    if (strip.is_joined)
      strip.max_rows = buffer_bytes_ / strip.row_bytes;
    else if (parts > 1 || dst_gap < 0 || src_gap < 0 || dst_gap > kMaxGapBytes || src_gap > kMaxGapBytes)
      strip.max_rows = 1;
    else
      strip.max_rows = Min(kMaxRows, buffer_bytes_ / RoundUp(strip.row_bytes));
  }

  // Entries [first, end). `checks`: this strip reports bad entries; the others skip them in silence.
  __aicore__ inline void CopyStrip(const Strip& strip, int64_t first, int64_t end, bool checks) {
    int64_t dst_slot, src_slot;
    for (int64_t i = first; i < end;) {
      if (!ReadEntry(i, checks, dst_slot, src_slot)) {
        ++i;
        continue;
      }
      int64_t rows = 1, next_dst, next_src;
      while (i + rows < end && rows < strip.max_rows && ReadEntry(i + rows, false, next_dst, next_src) &&
             next_dst == dst_slot + rows && next_src == src_slot + rows)
        ++rows;
      Piece piece;
      piece.dst = strip.dst + static_cast<uint64_t>(dst_slot * strip.dst_stride);
      piece.src = strip.src + static_cast<uint64_t>(src_slot * strip.src_stride);
      piece.row_bytes = strip.is_joined ? rows * strip.row_bytes : strip.row_bytes;
      piece.rows = strip.is_joined ? 1 : rows;
      piece.dst_gap = rows > 1 ? strip.dst_stride - strip.row_bytes : 0;
      piece.src_gap = rows > 1 ? strip.src_stride - strip.row_bytes : 0;
      Add(piece);
      i += rows;
    }
  }

  // False where nothing may be touched: padding, or an index that is out of range.
  __aicore__ inline bool ReadEntry(int64_t i, bool checks, int64_t& dst_slot, int64_t& src_slot) {
    dst_slot = dst_is_int64_ ? dst64_.GetValue(i * dst_stride_) : dst32_.GetValue(i * dst_stride_);
    src_slot = src_is_int64_ ? src64_.GetValue(i * src_stride_) : src32_.GetValue(i * src_stride_);
    const bool is_dst_bad = dst_slot < -1 || dst_slot >= dst_slots_;
    const bool is_src_bad = src_slot < -1 || src_slot >= src_slots_;
    if (checks && is_dst_bad)
      Report(kBadDstIndex, i, dst_slot, dst_slots_);
    else if (checks && is_src_bad)
      Report(kBadSrcIndex, i, src_slot, src_slots_);
    return !is_dst_bad && !is_src_bad && dst_slot >= 0 && src_slot >= 0;
  }

  // --- How they move ----------------------------------------------------------------------------

  __aicore__ inline void Add(Piece& piece) {
    const int64_t bytes = piece.rows * RoundUp(piece.row_bytes);
    if (filled_bytes_ + bytes > buffer_bytes_ || num_pieces_[filling_] == kMaxPieces)
      Load();
    piece.offset = filled_bytes_;
    filled_bytes_ += bytes;
    pieces_[filling_][num_pieces_[filling_]++] = piece;
  }

  // Starts the loads of the buffer that is planned, and the stores of the one before it.
  __aicore__ inline void Load() {
    if (num_pieces_[filling_] == 0)
      return;
    Buffer buffer = queue_.AllocTensor<uint8_t>();
    AscendC::DataCopyPadExtParams<uint8_t> no_padding{false, 0, 0, 0};
    for (int32_t i = 0; i < num_pieces_[filling_]; ++i) {
      const Piece& piece = pieces_[filling_][i];
      AscendC::DataCopyExtParams shape{static_cast<uint16_t>(piece.rows),
                                       static_cast<uint32_t>(piece.row_bytes),
                                       static_cast<uint32_t>(piece.src_gap), 0, 0};
      bytes_.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(piece.src));
      AscendC::DataCopyPad(buffer[static_cast<uint32_t>(piece.offset)], bytes_, shape, no_padding);
    }
    queue_.EnQue(buffer);
    filling_ = 1 - filling_;
    filled_bytes_ = 0;
    if (++in_flight_ == kBuffers)
      Store();
    num_pieces_[filling_] = 0;
  }

  __aicore__ inline void Store() {
    const int32_t oldest = in_flight_ == kBuffers ? filling_ : 1 - filling_;
    Buffer buffer = queue_.DeQue<uint8_t>();
    for (int32_t i = 0; i < num_pieces_[oldest]; ++i) {
      const Piece& piece = pieces_[oldest][i];
      AscendC::DataCopyExtParams shape{static_cast<uint16_t>(piece.rows),
                                       static_cast<uint32_t>(piece.row_bytes), 0,
                                       static_cast<uint32_t>(piece.dst_gap), 0};
      bytes_.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(piece.dst));
      AscendC::DataCopyPad(bytes_, buffer[static_cast<uint32_t>(piece.offset)], shape);
    }
    queue_.FreeTensor(buffer);
    --in_flight_;
  }

  __aicore__ inline void Finish() {
    Load();
    while (in_flight_ > 0)
      Store();
  }

  // --- Errors -----------------------------------------------------------------------------------

  // Entries come in order, so a core's first is its lowest position.
  __aicore__ inline void Report(int64_t what, int64_t position, int64_t value, int64_t limit) {
    if (has_error_ || !reports_)
      return;
    has_error_ = true;
    error_[kErrorWhat] = what;
    error_[kErrorCall] = Word(kCall);
    error_[kErrorPosition] = position;
    error_[kErrorValue] = value;
    error_[kErrorLimit] = limit;
  }

  // Into this core's lines, unless an earlier report is still there.
  __aicore__ inline void WriteError() {
    AscendC::LocalTensor<int64_t> lines = error_buffer_.Get<int64_t>();
    AscendC::LocalTensor<int64_t> line = lines[kErrorWords];
    const uint64_t flag_address =
        static_cast<uint64_t>(Word(kErrorRecord) + AscendC::GetBlockIdx() * kErrorLineBytes);
    const uint64_t line_address = flag_address + static_cast<uint64_t>(Word(kErrorCores) * kErrorLineBytes);
    AscendC::GlobalTensor<int64_t> flag, record;
    flag.SetGlobalBuffer(reinterpret_cast<__gm__ int64_t*>(flag_address));
    record.SetGlobalBuffer(reinterpret_cast<__gm__ int64_t*>(line_address));
    AscendC::DataCopyExtParams one_line{1, static_cast<uint32_t>(kErrorLineBytes), 0, 0, 0};
    AscendC::DataCopyPadExtParams<int64_t> no_padding{false, 0, 0, 0};
    AscendC::DataCopyPad(lines, flag, one_line, no_padding);
    AscendC::DataCopyPad(line, record, one_line, no_padding);
    AscendC::SetFlag<AscendC::HardEvent::MTE2_S>(EVENT_ID0);
    AscendC::WaitFlag<AscendC::HardEvent::MTE2_S>(EVENT_ID0);
    if (lines.GetValue(0) != 0)
      return;
    error_[kErrorSequence] = line.GetValue(kErrorSequence) + 1;
    lines.SetValue(0, 1);
    for (uint32_t i = 0; i < kErrorWords; ++i)
      line.SetValue(i, error_[i]);
    AscendC::SetFlag<AscendC::HardEvent::S_MTE3>(EVENT_ID0);
    AscendC::WaitFlag<AscendC::HardEvent::S_MTE3>(EVENT_ID0);
    AscendC::DataCopyPad(record, line, one_line);
    AscendC::DataCopyPad(flag, lines, one_line);
  }

  AscendC::GlobalTensor<int64_t> words_;
  AscendC::GlobalTensor<uint8_t> bytes_;
  AscendC::GlobalTensor<int64_t> dst64_, src64_;
  AscendC::GlobalTensor<int32_t> dst32_, src32_;
  AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, kBuffers> queue_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> error_buffer_;
  int64_t buffer_bytes_ = 0;
  int64_t num_entries_ = 0;
  int64_t dst_slots_ = 0, src_slots_ = 0;
  int64_t dst_stride_ = 1, src_stride_ = 1;
  bool dst_is_int64_ = true, src_is_int64_ = true;
  bool reports_ = false, has_error_ = false;
  int64_t error_[kErrorWords] = {};
  Piece pieces_[kBuffers][kMaxPieces];
  int32_t num_pieces_[kBuffers] = {0, 0};
  int32_t filling_ = 0;  // the buffer that is being planned
  int32_t in_flight_ = 0;
  int64_t filled_bytes_ = 0;
};

}  // namespace hicache

extern "C" __global__ __aicore__ void hicache_kv_exchange(GM_ADDR params) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  AscendC::TPipe pipe;
  hicache::KvExchange exchange;
  exchange.Init(params, &pipe);
  exchange.Run();
}
