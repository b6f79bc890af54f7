// Hides the stand-ins' scheduling from the thread sanitizer, but for the order that
// CUDA promises.
//
// The scheduler has one lock, and each pass through it would order all that was done
// before it in one thread before all that follows in another: no race between two
// streams would ever be seen. So all of that is hidden, and each order that CUDA gives
// is told with Publish and Observe.
#pragma once

#if defined(__SANITIZE_THREAD__)
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreSyncBegin(const char* file, int line);
void AnnotateIgnoreSyncEnd(const char* file, int line);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#endif

namespace keras_hvd::stand_in {

// Whether this thread is hidden now.
inline thread_local bool hidden = false;

inline void Hide() {
#if defined(__SANITIZE_THREAD__)
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
#endif
  hidden = true;
}

inline void Show() {
  hidden = false;
#if defined(__SANITIZE_THREAD__)
  AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
#endif
}

// This thread's work so far comes before all that follows an Observe of the same.
inline void Publish([[maybe_unused]] void* what) {
#if defined(__SANITIZE_THREAD__)
  const bool was_hidden = hidden;
  if (was_hidden) Show();
  __tsan_release(what);
  if (was_hidden) Hide();
#endif
}

inline void Observe([[maybe_unused]] void* what) {
#if defined(__SANITIZE_THREAD__)
  const bool was_hidden = hidden;
  if (was_hidden) Show();
  __tsan_acquire(what);
  if (was_hidden) Hide();
#endif
}

}  // namespace keras_hvd::stand_in
