// What NCCL's header names of the CUDA runtime, of which parts are in several packages.
#ifndef KERAS_HVD_TF_OPS_TESTING_CUDA_TYPES_CUDA_RUNTIME_H_
#define KERAS_HVD_TF_OPS_TESTING_CUDA_TYPES_CUDA_RUNTIME_H_

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;

// Before 2.24 it has bfloat16 only after CUDA's header of that.
#define __CUDA_BF16_TYPES_EXIST__

#endif  // KERAS_HVD_TF_OPS_TESTING_CUDA_TYPES_CUDA_RUNTIME_H_
