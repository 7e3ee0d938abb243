// The loop that one would write by hand for rows of one plane: threads, memcpy of each row, and the source
// fetched ahead. Built and called by bench_transfer_kv.py as the baseline of the CPU figures.
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

extern "C" void copy_rows_by_hand(char* dst, const char* src, const int64_t* dst_slots,
                                  const int64_t* src_slots, int64_t rows, int64_t row_bytes, int64_t ahead,
                                  int threads) {
  const auto work = [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (ahead > 0 && i + ahead < end)
        for (int64_t at = 0; at < row_bytes; at += 64)
          __builtin_prefetch(src + src_slots[i + ahead] * row_bytes + at, 0, 0);
      std::memcpy(dst + dst_slots[i] * row_bytes, src + src_slots[i] * row_bytes, row_bytes);
    }
  };
  std::vector<std::thread> pool;
  for (int t = 1; t < threads; ++t)
    pool.emplace_back(work, rows * t / threads, rows * (t + 1) / threads);
  work(0, rows / threads);
  for (std::thread& thread : pool)
    thread.join();
}
