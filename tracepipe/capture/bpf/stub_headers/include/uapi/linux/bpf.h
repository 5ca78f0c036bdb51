/* BCC carries the bpf(2) definitions that match its own helpers; take those, not some kernel's. */
#include <bcc/bpf.h>
