// The names of the CUDA runtime that NCCL's header uses. Parts of the runtime are in
// several packages.
#pragma once

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;

// Before 2.24 it has bfloat16 only after CUDA's header of that.
#define __CUDA_BF16_TYPES_EXIST__
