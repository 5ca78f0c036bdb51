"""The engine `bpftrace`: a script that is written for the plan, and its output read as records."""
