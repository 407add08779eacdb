// The thread attributes of MSL that a kernel may ask for, as the runtime keeps them for each thread
// and as the generated entry function reads them. translate.py takes their names from here.
#pragma once
#include <stdint.h>

struct msl_thread {
  uint32_t thread_position_in_grid[3];
  uint32_t thread_position_in_threadgroup[3];
  uint32_t threadgroup_position_in_grid[3];
  uint32_t threads_per_threadgroup[3];           // fewer at the edges of the grid
  uint32_t dispatch_threads_per_threadgroup[3];  // as launched
  uint32_t threads_per_grid[3];
  uint32_t threadgroups_per_grid[3];
  uint32_t grid_origin[3];
  uint32_t grid_size[3];
  uint32_t thread_index_in_threadgroup;
  uint32_t thread_index_in_simdgroup;
  uint32_t simdgroup_index_in_threadgroup;
  uint32_t thread_index_in_quadgroup;
  uint32_t quadgroup_index_in_threadgroup;
  uint32_t simdgroups_per_threadgroup;
  uint32_t dispatch_simdgroups_per_threadgroup;
  uint32_t quadgroups_per_threadgroup;
  uint32_t dispatch_quadgroups_per_threadgroup;
  uint32_t threads_per_simdgroup;
  uint32_t thread_execution_width;
};
