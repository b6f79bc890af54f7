// What an op's kernel has in common on CPUs and GPUs: the same class.
#pragma once

#include "tensorflow/core/framework/op_kernel.h"

// A kernel for CPUs and GPUs; what follows says which of its tensors stay in the host's
// memory: .HostMemory("splits").
#define KERAS_HVD_REGISTER(OP, KERNEL, ...)                                 \
  REGISTER_KERNEL_BUILDER(Name(OP).Device(tensorflow::DEVICE_CPU), KERNEL); \
  REGISTER_KERNEL_BUILDER(Name(OP).Device(tensorflow::DEVICE_GPU) __VA_ARGS__, KERNEL)
