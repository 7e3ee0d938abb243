// Method `kernel`: one launch of kv_exchange_kernel.cpp for a whole call.
#pragma once

#include "../transfer_kv.h"

namespace hicache {

// Empty, or why the kernel can't be launched here.
const std::string& missing_kernel();

// Submits a call whose pools the AI cores reach. The current device is the call's.
void exchange_rows(const TransferArgs& args);

}  // namespace hicache
