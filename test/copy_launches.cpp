// csrc/copy_launches.h for test_copy_launches.py: the most units that a launch has once one side is packed.
#include "../csrc/copy_launches.h"

extern "C" int64_t most_packed_units(int64_t row_bytes, int64_t slot_stride_bytes, int64_t num_entries,
                                     int64_t max_bytes) {
  hicache::PlaneGroup group;
  group.chunk_bytes = row_bytes;
  group.dst_slot_stride_bytes = group.src_slot_stride_bytes = slot_stride_bytes;
  group.planes = {{nullptr, nullptr}};
  int64_t most = 0;
  hicache::for_each_launch(
      hicache::box_of(group, num_entries, /*is_dst_host=*/true),
      [&](const hicache::Box& box, int) {
        const int vector_bytes = hicache::vector_bytes_of(hicache::compact_box(box, /*is_dst=*/true));
        int64_t units = (box.chunk_bytes + vector_bytes - 1) / vector_bytes;
        for (size_t k = 0; k < box.num_dims; ++k)
          units *= box.dims[k].size;
        most = std::max(most, units);
      },
      max_bytes);
  return most;
}
