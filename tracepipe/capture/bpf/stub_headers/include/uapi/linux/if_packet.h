/* Included by BCC for packet filters, which tracepipe does not use. */
