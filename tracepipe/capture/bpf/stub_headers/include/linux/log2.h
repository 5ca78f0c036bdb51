/* Included by BCC for stack-trace tables, which tracepipe does not use. */
