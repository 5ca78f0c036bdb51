"""A small transformer that decodes or trains, eagerly and in a CUDA graph, or compiled.

python captured_model.py decode|train|compile

Between cuProfilerStart and cuProfilerStop, two eager steps and four replays of such a step run.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, LENGTH, WORDS = 256, 4, 64, 1000


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, HEADS, LENGTH, WIDTH // HEADS))

    def attend(self, x, position):
        batch, length, _ = x.shape
        split = self.qkv(x).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        if position is not None:
            self.keys.index_copy_(2, position, k)
            self.values.index_copy_(2, position, v)
            k, v = self.keys, self.values
        found = F.scaled_dot_product_attention(q, k, v)
        return self.out(found.transpose(1, 2).reshape(batch, length, WIDTH))

    def forward(self, x, position=None):
        x = x + self.attend(self.norm1(x), position)
        h = self.up(self.norm2(x))
        h = F.gelu(h)
        return x + self.down(h)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words, position=None):
        x = self.words(words)
        for block in self.blocks:
            x = block(x, position)
        return self.head(self.norm(x))


torch.manual_seed(0)
net = Net().cuda()
word = torch.zeros(1, 1, dtype=torch.long, device="cuda")
position = torch.zeros(1, dtype=torch.long, device="cuda")
batch = torch.randint(0, WORDS, (4, 32), device="cuda")
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
model = torch.compile(net) if sys.argv[1] == "compile" else net


@torch.no_grad()
def decode():
    word.copy_(net(word, position)[:, -1].argmax(-1, keepdim=True))
    position.add_(1)


def train():
    loss = F.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


step = decode if sys.argv[1] == "decode" else train
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(side)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    step()
torch.cuda.synchronize()
torch.cuda.profiler.start()
for _ in range(2):
    step()
for _ in range(4):
    graph.replay()
torch.cuda.synchronize()
torch.cuda.profiler.stop()
