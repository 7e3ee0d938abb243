// Every schema of the library, once. Implementations are registered by each backend's own file.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

STABLE_TORCH_LIBRARY(hicache, m) {
  m.def(
      "transfer_kv(Tensor(a!)[] dst, Tensor[] src, Tensor dst_indices, Tensor src_indices, *, "
      "int slot_dim=0, Tensor? count=None, str method='auto', int max_blocks=0) -> ()");

  // Raises, and clears, the first bad index that a kernel on this tensor's device met.
  m.def("check_errors(Tensor on_device) -> ()");

  // Host memory of the accelerator that `on_device` is on; host_memory.py is their only caller.
  // Addresses are integers because no tensor exists yet (or no longer) where they are needed.
  m.def("register_host_memory(Tensor on_device, int address, int nbytes) -> ()");
  // Host memory that the device reaches already, at an address that its owner knows.
  m.def("map_host_memory(Tensor on_device, int address, int nbytes, int device_address) -> ()");
  m.def("unregister_host_memory(Tensor on_device, int address) -> ()");
  m.def("host_device_address(Tensor on_device, int address, int nbytes) -> int");
}

// Tensors that are no plain memory reach the op under keys of their own, ahead of any backend: refused
// there, since torch would otherwise copy them first (conjugates) or find no kernel (sparse).
namespace hicache {
namespace {

using torch::stable::Tensor;

constexpr char kSparse[] = "sparse and nested tensors are refused; pass their strided values";
constexpr char kQuantized[] = "quantized tensors are refused; pass their integer representation";
constexpr char kLazy[] =
    "conjugate and negated views are refused; resolve them first (resolve_conj, resolve_neg)";

template <const char* reason>
void refuse(const std::vector<Tensor>&, const std::vector<Tensor>&, const Tensor&, const Tensor&, int64_t,
            const std::optional<Tensor>&, const std::string&, int64_t) {
  throw std::invalid_argument(std::string("[transfer_kv] ") + reason + ".");
}

}  // namespace
}  // namespace hicache

#define HICACHE_REFUSE(key, reason)                                      \
  STABLE_TORCH_LIBRARY_IMPL(hicache, key, m) {                           \
    m.impl("transfer_kv", TORCH_BOX(&hicache::refuse<hicache::reason>)); \
  }
HICACHE_REFUSE(SparseCPU, kSparse)
HICACHE_REFUSE(SparseCUDA, kSparse)
HICACHE_REFUSE(SparseCsrCPU, kSparse)
HICACHE_REFUSE(SparseCsrCUDA, kSparse)
HICACHE_REFUSE(SparsePrivateUse1, kSparse)
HICACHE_REFUSE(SparseCsrPrivateUse1, kSparse)
HICACHE_REFUSE(SparseMeta, kSparse)
HICACHE_REFUSE(SparseCsrMeta, kSparse)
HICACHE_REFUSE(NestedTensorCPU, kSparse)
HICACHE_REFUSE(NestedTensorCUDA, kSparse)
HICACHE_REFUSE(NestedTensorPrivateUse1, kSparse)
HICACHE_REFUSE(NestedTensorMeta, kSparse)
HICACHE_REFUSE(AutogradNestedTensor, kSparse)
HICACHE_REFUSE(MkldnnCPU, kSparse)
HICACHE_REFUSE(QuantizedCPU, kQuantized)
HICACHE_REFUSE(QuantizedCUDA, kQuantized)
HICACHE_REFUSE(QuantizedPrivateUse1, kQuantized)
HICACHE_REFUSE(Conjugate, kLazy)
HICACHE_REFUSE(Negative, kLazy)
