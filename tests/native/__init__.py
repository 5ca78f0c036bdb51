"""The native core under the sanitizers: `make sanitize`."""
