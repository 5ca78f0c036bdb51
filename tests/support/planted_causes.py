"""Functions in which a program spends a known time while a GPU is idle, for programs that tests write.

The program imports json, threading and time before them, and begins a thread of `holder`.
"""

CAUSES = """
now = time.monotonic_ns
document = json.dumps([{"a": i, "b": [1.5, "text", None]} for i in range(400)])
lock, go, held, running = threading.Lock(), threading.Event(), threading.Event(), True

def repeat(ms, work):
    end = now() + ms * 1_000_000
    while now() < end:
        work()

def holder():
    while go.wait() and running:
        go.clear()
        with lock:
            held.set(), time.sleep(0.010)

def parses():
    repeat(17, lambda: json.loads(document))

def sleeps():
    time.sleep(0.012)

def locks():
    held.clear(), go.set(), held.wait()
    with lock:
        pass

def computes():
    count, end = 0, now() + 13_000_000
    while now() < end:
        count += 1
"""
