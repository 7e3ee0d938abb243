// What CANN's build generates for a kernel, here for the emulation: the launch symbol. And what tests set
// and read.
#include <cstdio>
#include <cstdlib>

#include "kernel_operator.h"

extern "C" void hicache_kv_exchange(GM_ADDR params);

namespace emulation {

Counters counters;
Settings settings;
thread_local Core* core;

namespace {

std::string last_error;

int run_kernel(uint32_t blocks, void* params) {
  ++counters.launches;
  counters.blocks = blocks;
  for (int64_t i = 0; i < blocks; ++i) {
    Core running;
    running.index = settings.backward ? blocks - 1 - i : i;
    running.count = blocks;
    core = &running;
    try {
      hicache_kv_exchange(static_cast<GM_ADDR>(params));
      running.finish();
    } catch (const std::exception& error) {
      last_error = error.what();
      std::fprintf(stderr, "emulation: core %ld of %u: %s\n", static_cast<long>(running.index), blocks,
                   error.what());
      return sim::kAiCoreException;
    }
  }
  return 0;
}

}  // namespace
}  // namespace emulation

extern "C" uint32_t aclrtlaunch_hicache_kv_exchange(uint32_t blocks, void* stream, void* params) {
  if (const int error = sim::injected("aclrtlaunch_hicache_kv_exchange"))
    return static_cast<uint32_t>(error);
  if (blocks == 0)
    return sim::kInvalidParam;
  return static_cast<uint32_t>(sim::submit(stream, [=] { return emulation::run_kernel(blocks, params); }));
}

// --- For tests ----------------------------------------------------------------------------------

extern "C" void emulation_set(int64_t buffer_bytes, int backward, int stores_first) {
  emulation::settings = {buffer_bytes, backward != 0, stores_first != 0};
}
extern "C" void emulation_counters(int64_t* out) {
  std::memcpy(out, &emulation::counters, sizeof(emulation::counters));
}
extern "C" void emulation_reset_counters() {
  emulation::counters = {};
}
extern "C" const char* emulation_last_error() {
  return emulation::last_error.c_str();
}
