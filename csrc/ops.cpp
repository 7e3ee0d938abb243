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

  // Lets the current stream wait for an engine's newest load of a layer. `pool` is what is read next: it
  // counts as mutated so that no read moves in front. Implemented in Python, layer_wait.py.
  m.def("wait_layer(Tensor(a!)[] pool, int engine, int layer) -> ()");

  // Raises, and clears, the first bad index that a kernel on this tensor's device met.
  m.def("check_errors(Tensor on_device) -> ()");

  // Which method would serve the same call of transfer_kv, and why: one JSON object. plan.py is its caller.
  m.def(
      "explain(Tensor[] dst, Tensor[] src, Tensor dst_indices, Tensor src_indices, *, int slot_dim=0, "
      "Tensor? count=None, str method='auto', int max_blocks=0) -> str");
  // The same for CPU tensors as if those of `on_device` (dst, src, dst_indices, src_indices) were an
  // accelerator's.
  m.def(
      "explain_as_if(Tensor[] dst, Tensor[] src, Tensor dst_indices, Tensor src_indices, *, int slot_dim=0, "
      "Tensor? count=None, str method='auto', bool[] on_device, bool capturing, bool pageable, int[] table) -> "
      "str");
  // What `auto` decides by on this tensor's device, in the order of MethodTable in plan.h.
  m.def("set_method_table(Tensor on_device, int[] values) -> ()");

  // transfer_kv for the tensors of an integration's call, once keep_call has said which planes they are: see
  // known_calls.h. False where it has not: then Python works the planes out, and says what is wrong with them.
  m.def(
      "transfer_known(Tensor(a!)[] dst, Tensor[] src, Tensor dst_indices, Tensor src_indices, int form, "
      "int max_blocks) -> bool");
  m.def(
      "keep_call(Tensor[] dst, Tensor[] src, Tensor dst_indices, Tensor src_indices, int form, "
      "Tensor[] dst_planes, Tensor[] src_planes, int slot_dim, int page_size) -> ()");

  // One page index for `page_size` tokens on an accelerator, -1 for a page of -1, 1 << 62 for tokens that are
  // no whole, aligned page. On devices without a kernel of their own it is integrations/sglang/pages.py.
  m.def("page_indices(Tensor tokens, int page_size) -> Tensor");

  // Records of bad indices apart from the device's own: while a thread uses one, its calls report there.
  m.def("new_error_record(Tensor on_device) -> int");
  m.def("use_error_record(Tensor on_device, int record) -> ()");    // 0: the device's own again
  m.def("check_error_record(Tensor on_device, int record) -> ()");  // raises, and clears; no sync
  m.def("free_error_record(Tensor on_device, int record) -> ()");

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

template <const char* reason>
std::string refuse_to_explain(const std::vector<Tensor>& dst, const std::vector<Tensor>& src,
                              const Tensor& dst_indices, const Tensor& src_indices, int64_t slot_dim,
                              const std::optional<Tensor>& count, const std::string& method,
                              int64_t max_blocks) {
  refuse<reason>(dst, src, dst_indices, src_indices, slot_dim, count, method, max_blocks);
  return "";
}

// Of tensors that are no plain memory, in modes that look at each op (fake tensors, functorch), and on a
// device without a backend nothing is known: what they do to a call, they do to transfer_kv.
bool transfer_unknown(const std::vector<Tensor>&, const std::vector<Tensor>&, const Tensor&, const Tensor&,
                      int64_t, int64_t) {
  return false;
}

void keep_nothing(const std::vector<Tensor>&, const std::vector<Tensor>&, const Tensor&, const Tensor&, int64_t,
                  const std::vector<Tensor>&, const std::vector<Tensor>&, int64_t, int64_t) {}

}  // namespace
}  // namespace hicache

STABLE_TORCH_LIBRARY_IMPL(hicache, CompositeExplicitAutograd, m) {
  m.impl("transfer_known", TORCH_BOX(&hicache::transfer_unknown));
  m.impl("keep_call", TORCH_BOX(&hicache::keep_nothing));
}

#define HICACHE_KNOW_NOTHING(key)                                    \
  STABLE_TORCH_LIBRARY_IMPL(hicache, key, m) {                       \
    m.impl("transfer_known", TORCH_BOX(&hicache::transfer_unknown)); \
    m.impl("keep_call", TORCH_BOX(&hicache::keep_nothing));          \
  }
HICACHE_KNOW_NOTHING(Python)
HICACHE_KNOW_NOTHING(FuncTorchDynamicLayerFrontMode)
HICACHE_KNOW_NOTHING(Functionalize)
HICACHE_KNOW_NOTHING(ZeroTensor)

#define HICACHE_REFUSE(key, reason)                                             \
  STABLE_TORCH_LIBRARY_IMPL(hicache, key, m) {                                  \
    m.impl("transfer_kv", TORCH_BOX(&hicache::refuse<hicache::reason>));        \
    m.impl("explain", TORCH_BOX(&hicache::refuse_to_explain<hicache::reason>)); \
    m.impl("transfer_known", TORCH_BOX(&hicache::transfer_unknown));            \
    m.impl("keep_call", TORCH_BOX(&hicache::keep_nothing));                     \
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
