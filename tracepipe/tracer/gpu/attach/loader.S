/* SPDX-License-Identifier: MIT */
# The code that a thread of a running process executes for tracepipe, x86-64: it creates a thread that loads a library,
# and continues.
#
#     thread that was stopped      detour: saves its state ──▶ pthread_create ──▶ restores it, continues where it was
#     the new thread                                             begin: dlopen ──▶ dlsym ──▶ the library's entry
#
# The stopped thread calls only pthread_create, at a place where it holds no lock of the C library. Then it waits to be
# stopped again and to have its registers restored: so the kernel treats an interrupted system call, and signals that
# arrived meanwhile, as it would have without the detour. If nobody stops it, it restores itself after some seconds.
# loader.py has the layout of DATA, which follows the page of this code, and the bytes of this code; a test compares
# them with the assembler's output for this file.
#
# When the detour begins, rbx is DATA, rsp is the end of a separate stack with the flags on it, and all signals are
# blocked.
        .set DATA, code + 0x1000
        .set STATE, 0x000          # what the new thread has done, see below
        .set CREATED, 0x004        # what pthread_create returned
        .set RESULT, 0x008         # what the entry returned
        .set SAVED_ERRNO, 0x00c
        .set SAVED_MASK, 0x010     # features that xsave saved: eax, edx
        .set THREAD, 0x018
        .set ERRNO_LOCATION, 0x020 # addresses of functions
        .set PTHREAD_CREATE, 0x028
        .set PTHREAD_SELF, 0x030
        .set PTHREAD_DETACH, 0x038
        .set DLOPEN, 0x040
        .set DLSYM, 0x048
        .set DLERROR, 0x050
        .set SIGNALS, 0x058        # the thread's mask
        .set REGISTERS, 0x060      # rax rbx rcx rdx rsi rdi rbp rsp r8 … r15 rip
        .set WAITS, 0x0f0          # 1 when the detour is done and the thread waits
        .set ERROR, 0x100          # 256 bytes of text
        .set ENTRY, 0x200          # name of the entry
        .set PATH, 0x400           # of the library
        .set ARGUMENT, 0x800       # text for the entry
        .set XSAVE, 0x1000
        .set ERROR_BYTES, 255
        .set CYCLES_HIGH, 2        # a multiple of 2^32 cycles, of a second or two
        .set LOADED, 1             # states
        .set NOT_LOADED, 2
        .set NO_ENTRY, 3
        .intel_syntax noprefix
        .text
code:
detour:
        cld
        xor ecx, ecx
        xgetbv
        mov [rbx + SAVED_MASK], eax
        mov [rbx + SAVED_MASK + 4], edx
        xsave64 [rbx + XSAVE]
        call [rbx + ERRNO_LOCATION]
        mov r12, rax
        mov eax, [rax]
        mov [rbx + SAVED_ERRNO], eax
        lea rdi, [rbx + THREAD]
        xor esi, esi
        lea rdx, [rip + begin]
        mov rcx, rbx
        call [rbx + PTHREAD_CREATE]
        mov [rbx + CREATED], eax
        mov eax, [rbx + SAVED_ERRNO]
        mov [r12], eax
        mov eax, [rbx + SAVED_MASK]
        mov edx, [rbx + SAVED_MASK + 4]
        xrstor64 [rbx + XSAVE]
        rdtsc
        lea r12d, [rdx + CYCLES_HIGH]
        mov dword ptr [rbx + WAITS], 1
wait:
        mov eax, 24                # sched_yield: other calls would overwrite how an interrupted sleep continues
        syscall
        rdtsc
        cmp edx, r12d
        jb wait
        popfq                      # from here on nothing changes the flags
        mov rsp, [rip + DATA + REGISTERS + 56]
        mov eax, 14                # rt_sigprocmask(SIG_SETMASK, signals, 0, 8)
        mov edi, 2
        lea rsi, [rip + DATA + SIGNALS]
        mov edx, 0
        mov r10d, 8
        syscall
        mov rax, [rip + DATA + REGISTERS]
        mov rbx, [rip + DATA + REGISTERS + 8]
        mov rcx, [rip + DATA + REGISTERS + 16]
        mov rdx, [rip + DATA + REGISTERS + 24]
        mov rsi, [rip + DATA + REGISTERS + 32]
        mov rdi, [rip + DATA + REGISTERS + 40]
        mov rbp, [rip + DATA + REGISTERS + 48]
        mov r8, [rip + DATA + REGISTERS + 64]
        mov r9, [rip + DATA + REGISTERS + 72]
        mov r10, [rip + DATA + REGISTERS + 80]
        mov r11, [rip + DATA + REGISTERS + 88]
        mov r12, [rip + DATA + REGISTERS + 96]
        mov r13, [rip + DATA + REGISTERS + 104]
        mov r14, [rip + DATA + REGISTERS + 112]
        mov r15, [rip + DATA + REGISTERS + 120]
        jmp [rip + DATA + REGISTERS + 128]

begin:
        push rbx
        mov rbx, rdi
        call [rbx + PTHREAD_SELF]
        mov rdi, rax
        call [rbx + PTHREAD_DETACH]
        lea rdi, [rbx + PATH]
        mov esi, 2                 # RTLD_NOW
        call [rbx + DLOPEN]
        mov ecx, NOT_LOADED
        test rax, rax
        jz failed
        mov rdi, rax
        lea rsi, [rbx + ENTRY]
        call [rbx + DLSYM]
        mov ecx, NO_ENTRY
        test rax, rax
        jz failed
        lea rdi, [rbx + ARGUMENT]
        call rax
        mov [rbx + RESULT], eax
        mov ecx, LOADED
        jmp ended
failed:
        push rcx
        sub rsp, 8
        call [rbx + DLERROR]
        add rsp, 8
        test rax, rax
        jz unexplained
        lea rdi, [rbx + ERROR]
        mov rsi, rax
        mov ecx, ERROR_BYTES
copy:
        lodsb
        stosb
        test al, al
        loopnz copy
unexplained:
        pop rcx
ended:
        mov [rbx + STATE], ecx
        xor eax, eax
        pop rbx
        ret
