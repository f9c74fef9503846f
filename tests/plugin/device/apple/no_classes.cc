// A library that looks like an Objective-C runtime with Metal, but has no class at all.
#define NOTHING(name) \
  extern "C" __attribute__((visibility("default"))) void* name() { return nullptr; }

NOTHING(objc_getClass)
NOTHING(sel_registerName)
NOTHING(objc_msgSend)
NOTHING(objc_autoreleasePoolPush)
NOTHING(objc_autoreleasePoolPop)
NOTHING(MTLCreateSystemDefaultDevice)
NOTHING(_NSConcreteStackBlock)
