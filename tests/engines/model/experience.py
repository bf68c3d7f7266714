"""Random experience for the model engine's tests, the same for the same seed."""

import torch

from headrace.engines.model.base import Experience, Samples

VOCABULARY = 259


def random_samples(
    groups: int = 4,
    n: int = 4,
    prompt: tuple[int, int] = (1, 6),
    response: tuple[int, int] = (1, 7),
    common: int = 3,
    seed: int = 0,
) -> Samples:
    """``groups`` × ``n`` samples with lengths from the given closed ranges, the samples of a group side by side.

    All prompts begin with the same ``common`` tokens, then come ``prompt`` tokens of their own.
    """
    draw = torch.Generator().manual_seed(seed)

    def length(bounds: tuple[int, int], count: int) -> list[int]:
        return torch.randint(bounds[0], bounds[1] + 1, (count,), generator=draw).tolist()

    shared = torch.randint(3, VOCABULARY, (common,), generator=draw)
    own = [torch.randint(3, VOCABULARY, (size,), generator=draw) for size in length(prompt, groups)]
    prompts = [torch.cat([shared, rest]) for rest in own]
    responses = [torch.randint(3, VOCABULARY, (size,), generator=draw) for size in length(response, groups * n)]
    repeated = [p for p in prompts for _ in range(n)]
    return Samples(
        groups=torch.arange(groups).repeat_interleave(n) * 7 + 5,
        prompt_ids=torch.cat(repeated),
        prompt_offsets=torch.tensor([0, *(len(p) for p in repeated)]).cumsum(0),
        response_ids=torch.cat(responses),
        offsets=torch.tensor([0, *(len(r) for r in responses)]).cumsum(0),
    )


def random_experience(samples: Samples, seed: int = 0, rejected: float = 0.2) -> Experience:
    """Advantages for each sample, a behaviour policy, and some samples and tokens that are not trained on."""
    draw = torch.Generator().manual_seed(seed + 1)
    lengths = samples.offsets.diff()
    accepted = (torch.rand(len(samples), generator=draw) >= rejected).repeat_interleave(lengths)
    written = torch.rand(samples.tokens, generator=draw) > 0.1
    return Experience(
        samples=samples,
        mask=accepted & written,
        advantages=torch.randn(len(samples), generator=draw).repeat_interleave(lengths),
        behaviour=-3 * torch.rand(samples.tokens, generator=draw),
    )
