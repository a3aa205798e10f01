// What a kernel under emulation calls: where its thread stands, and the rendezvous points.
// One operating system thread runs one threadgroup at a time; its threads are fibers.
#pragma once
#include <cstdint>

namespace emulation {

struct Thread {
  unsigned position[3];    // within the threadgroup
  unsigned group[3];       // of the threadgroup in the grid
  unsigned group_size[3];  // threads of a threadgroup
  unsigned num_groups[3];
  unsigned index;  // of the thread in its threadgroup, x fastest
};

extern "C" {
const Thread* emulation_thread();
// All threads of the threadgroup meet here.
void emulation_barrier(const char* file, int line);
// All lanes of the simdgroup meet here; values[i] becomes what lane i brought.
void emulation_exchange(const char* file, int line, std::uint64_t mine, std::uint64_t* values);
// All lanes of the simdgroup meet here and see each other's threadgroup memory.
void emulation_simd_barrier(const char* file, int line);
// Other threadgroups can read what this thread wrote, and it what those wrote before they counted.
void emulation_fence();
// Adds one to a counter, from `most` on begins again; returns what it was.
unsigned emulation_count(unsigned* at, unsigned most);
}

}  // namespace emulation
