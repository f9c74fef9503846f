// Threads that help to run the threadgroups of a dispatch. The caller always works too,
// and never waits for a helper that has not started: a busy pool costs speed, never
// progress. A forked process starts threads of its own.
#pragma once

#include <cstdint>
#include <functional>

namespace jfm {

// Threads per ParallelFor, the caller included; 0 = NumCpus().
void SetNumThreads(int num_threads);
int NumThreads();

// Runs work(index) once for every index below `count`, from several threads at once.
// Stops early, with some indices left out, after a call that returned false. Returns when
// all calls have.
void ParallelFor(uint64_t count, const std::function<bool(uint64_t index)>& work);

}  // namespace jfm
