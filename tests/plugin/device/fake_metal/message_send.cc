// objc_msgSend: keeps every argument register, asks runtime.cc for the method, jumps there.
// Arguments on the stack and returned structures are the method's own business.

#if defined(__x86_64__)
__asm__(R"(
  .text
  .globl objc_msgSend
  .type objc_msgSend,@function
objc_msgSend:
  pushq %rbp
  movq %rsp, %rbp
  subq $192, %rsp
  movq %rdi, (%rsp)
  movq %rsi, 8(%rsp)
  movq %rdx, 16(%rsp)
  movq %rcx, 24(%rsp)
  movq %r8, 32(%rsp)
  movq %r9, 40(%rsp)
  movaps %xmm0, 48(%rsp)
  movaps %xmm1, 64(%rsp)
  movaps %xmm2, 80(%rsp)
  movaps %xmm3, 96(%rsp)
  movaps %xmm4, 112(%rsp)
  movaps %xmm5, 128(%rsp)
  movaps %xmm6, 144(%rsp)
  movaps %xmm7, 160(%rsp)
  movq %rax, 176(%rsp)
  movq %rsp, %rdx
  call fake_metal_find_method@PLT
  movq %rax, %r11
  movq (%rsp), %rdi
  movq 8(%rsp), %rsi
  movq 16(%rsp), %rdx
  movq 24(%rsp), %rcx
  movq 32(%rsp), %r8
  movq 40(%rsp), %r9
  movaps 48(%rsp), %xmm0
  movaps 64(%rsp), %xmm1
  movaps 80(%rsp), %xmm2
  movaps 96(%rsp), %xmm3
  movaps 112(%rsp), %xmm4
  movaps 128(%rsp), %xmm5
  movaps 144(%rsp), %xmm6
  movaps 160(%rsp), %xmm7
  movq 176(%rsp), %rax
  leave
  jmp *%r11
  .size objc_msgSend, .-objc_msgSend

  .globl fake_metal_zero
  .hidden fake_metal_zero
  .type fake_metal_zero,@function
fake_metal_zero:
  xorl %eax, %eax
  xorl %edx, %edx
  pxor %xmm0, %xmm0
  pxor %xmm1, %xmm1
  ret
  .size fake_metal_zero, .-fake_metal_zero
)");
#elif defined(__aarch64__)
__asm__(R"(
  .text
  .globl objc_msgSend
  .type objc_msgSend,%function
objc_msgSend:
  stp x29, x30, [sp, #-224]!
  mov x29, sp
  stp x0, x1, [sp, #16]
  stp x2, x3, [sp, #32]
  stp x4, x5, [sp, #48]
  stp x6, x7, [sp, #64]
  str x8, [sp, #80]
  stp q0, q1, [sp, #96]
  stp q2, q3, [sp, #128]
  stp q4, q5, [sp, #160]
  stp q6, q7, [sp, #192]
  add x2, sp, #16
  bl fake_metal_find_method
  mov x16, x0
  ldp x0, x1, [sp, #16]
  ldp x2, x3, [sp, #32]
  ldp x4, x5, [sp, #48]
  ldp x6, x7, [sp, #64]
  ldr x8, [sp, #80]
  ldp q0, q1, [sp, #96]
  ldp q2, q3, [sp, #128]
  ldp q4, q5, [sp, #160]
  ldp q6, q7, [sp, #192]
  ldp x29, x30, [sp], #224
  br x16
  .size objc_msgSend, .-objc_msgSend

  .globl fake_metal_zero
  .hidden fake_metal_zero
  .type fake_metal_zero,%function
fake_metal_zero:
  mov x0, #0
  mov x1, #0
  movi v0.2d, #0
  movi v1.2d, #0
  movi v2.2d, #0
  movi v3.2d, #0
  ret
  .size fake_metal_zero, .-fake_metal_zero
)");
#else
#error "objc_msgSend is written for x86-64 and aarch64"
#endif

// Nothing on the stack is executed.
#ifdef __linux__
__asm__(".section .note.GNU-stack,\"\",%progbits\n.text");
#endif
