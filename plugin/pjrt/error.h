// PJRT_Error objects of our own: every error that a caller of our API sees is one, those
// of the host too, because hosts of other versions lay theirs out differently.
#pragma once

#include "plugin/pjrt/pjrt_api.h"
#include "plugin/status.h"

namespace jfm::pjrt {

// Null for an OK status.
PJRT_Error* NewError(const Status& status);

bool IsOurError(const PJRT_Error* error);

// The functions of the error slots, for errors of ours.
void DestroyError(PJRT_Error* error);
void ErrorMessage(const PJRT_Error* error, const char** message, size_t* message_size);
PJRT_ErrorCode ErrorCode(const PJRT_Error* error);

}  // namespace jfm::pjrt
