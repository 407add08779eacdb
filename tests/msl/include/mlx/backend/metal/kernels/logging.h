// Stand-in for MLX's header of this name, which prints from kernels.
#pragma once
#include <metal_stdlib>
