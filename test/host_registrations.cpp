// csrc/host_registrations.h for test_host_registrations.py. Addresses are numbers here; nothing is read.
#include "../csrc/host_registrations.h"

#include <cstdint>

using hicache::HostRegistrations;

static const char* pointer(int64_t address) {
  return reinterpret_cast<const char*>(address);
}

extern "C" {

HostRegistrations* create() {
  return new HostRegistrations;
}
void destroy(HostRegistrations* registrations) {
  delete registrations;
}
void add(HostRegistrations* registrations, int64_t host, int64_t nbytes, int64_t device) {
  registrations->add(pointer(host), static_cast<size_t>(nbytes), pointer(device));
}
bool remove_at(HostRegistrations* registrations, int64_t host) {
  return registrations->remove(pointer(host));
}
int64_t device_address(const HostRegistrations* registrations, int64_t begin, int64_t end) {
  return reinterpret_cast<int64_t>(registrations->device_address(pointer(begin), pointer(end)));
}
// Fills `found` (room for 16) and returns how many there are.
int64_t seams(const HostRegistrations* registrations, int64_t begin, int64_t end, int64_t* found) {
  int64_t count = 0;
  for (const char* seam : registrations->seams(pointer(begin), pointer(end)))
    found[count++] = reinterpret_cast<int64_t>(seam);
  return count;
}
}
