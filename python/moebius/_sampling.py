"""The sampling parameters, generated from crates/engine/src/sampler/params.rs by a test of moebius."""

from typing import TypedDict


class Sampling(TypedDict, total=False):
    """Parameters of the sampler; those left out keep the model's defaults."""

    #: randomness of the choice; 0 always picks the most likely token
    temperature: float
    #: keep the most likely tokens that together reach this probability; 1 is off
    top_p: float
    #: keep this number of most likely tokens; 0 or -1 keeps all
    top_k: int
    #: drop tokens with less than this share of the top token's probability; 0 is off
    min_p: float
    #: divide the logits of repeated tokens by this; 1 is off
    repeat_penalty: float
    #: number of last tokens that the penalties cover; -1 covers all
    repeat_last_n: int
    #: subtract this once from the logit of a token that occurred
    presence_penalty: float
    #: subtract this from the logit of a token for each time it occurred
    frequency_penalty: float
    #: DRY: strength of the penalty on repeated sequences; 0 is off
    dry_multiplier: float
    #: DRY: base of the penalty's growth with the length of the repetition
    dry_base: float
    #: DRY: length of the longest repetition without a penalty
    dry_allowed_length: int
    #: DRY: number of last tokens that the penalty covers; -1 covers all
    dry_penalty_last_n: int
    #: locally typical sampling: keep tokens of typical information up to this probability; 1 is off
    typical_p: float
    #: keep logits within this number of standard deviations of the best; 0 or below is off
    top_n_sigma: float
    #: XTC: probability of excluding the top choices; 0 is off
    xtc_probability: float
    #: XTC: minimum probability of a top choice
    xtc_threshold: float
    #: maximum change of the temperature with the entropy; 0 is off
    dynatemp_range: float
    #: exponent of the normalized entropy in the dynamic temperature
    dynatemp_exponent: float
    #: number of tokens that every truncating sampler keeps at least
    min_keep: int
    #: version of mirostat, 1 or 2, which replaces the other samplers; 0 is off
    mirostat: int
    #: mirostat: target surprise in bits
    mirostat_tau: float
    #: mirostat: learning rate
    mirostat_eta: float
