"""SGLang on torch.ops.hicache.transfer_kv. Importing this imports nothing of SGLang.

`kvcacheio` has the functions of sgl_kernel.kvcacheio, `jit` those of sglang.kernels.ops.kvcache.hicache,
`plugin` the entry point that lets SGLang's host pools call transfer_kv. docs/integrations/sglang.md.
"""
