//! Tokens that have a role: which of them end an answer, and the well-known names that say what files leave out. Knows
//! nothing of where the other roles come from.

use super::vocab::{TokenKind, Vocab};
use super::{Error, Roles};
use crate::folder;

/// Names of a turn's last token, in order of preference where the file names none.
const EOT_NAMES: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
];

/// Names that end a generation wherever they stand in a vocabulary.
const END_NAMES: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
];

/// Roles of code models: the key that names the token, the names it goes by otherwise, and whether it ends a
/// generation. Files often leave these as plain text, which they must not be.
const FILL_IN: [(&str, &[&str], bool); 6] = [
    (
        "tokenizer.ggml.fim_pre_token_id",
        &[
            "<|fim_prefix|>",
            "<fim-prefix>",
            "<fim_prefix>",
            "<｜fim▁begin｜>",
            "<PRE>",
            "▁<PRE>",
            "<|code_prefix|>",
            "<|prefix|>",
        ],
        false,
    ),
    (
        "tokenizer.ggml.fim_suf_token_id",
        &[
            "<|fim_suffix|>",
            "<fim-suffix>",
            "<fim_suffix>",
            "<｜fim▁hole｜>",
            "<SUF>",
            "▁<SUF>",
            "<|code_suffix|>",
            "<|suffix|>",
        ],
        false,
    ),
    (
        "tokenizer.ggml.fim_mid_token_id",
        &[
            "<|fim_middle|>",
            "<fim-middle>",
            "<fim_middle>",
            "<｜fim▁end｜>",
            "<MID>",
            "▁<MID>",
            "<|code_middle|>",
            "<|middle|>",
        ],
        false,
    ),
    ("tokenizer.ggml.fim_pad_token_id", &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"], true),
    ("tokenizer.ggml.fim_rep_token_id", &["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"], true),
    ("tokenizer.ggml.fim_sep_token_id", &["<|file_sep|>"], true),
];

/// Completes the roles that a file gives with those that well-known names give; tokens found by name become control
/// tokens, as files often call them plain text. `role` looks a key of [`FILL_IN`] up in the file.
pub fn complete(
    roles: &mut Roles,
    vocab: &mut Vocab,
    role: impl Fn(&'static str) -> Result<Option<u32>, Error>,
) -> Result<(), Error> {
    let mut by_name = |names: &[&str]| {
        let id = names.iter().find_map(|name| vocab.id(name.as_bytes()))?;
        vocab.set_kind(id, TokenKind::Control);
        Some(id)
    };
    roles.eot = roles.eot.or_else(|| by_name(EOT_NAMES));
    roles.eom = roles.eom.or_else(|| by_name(&["<|eom_id|>"]));
    for (found, (key, names, ends)) in roles.fill_in.iter_mut().zip(FILL_IN) {
        *found = role(key)?.or_else(|| by_name(names));
        roles.ends.extend(found.filter(|_| ends));
    }
    roles.ends.extend(END_NAMES.iter().filter_map(|name| by_name(&[name])));
    // To a byte-level vocabulary `</s>` may be a piece of HTML, so here the file's word counts.
    roles.ends.extend(vocab.id(b"</s>").filter(|&id| vocab.kind(id) == Some(TokenKind::Control)));
    roles.ends.extend([roles.eos, roles.eot, roles.eom].into_iter().flatten());
    roles.ends.sort_unstable();
    roles.ends.dedup();

    let has = |names: &[&str]| names.iter().any(|name| vocab.id(name.as_bytes()).is_some());
    // Where messages end with a call or a return, `<|end|>` only ends one of several messages of an answer.
    let calls = has(&["<|call|>", "<|calls|>"]) && has(&["<|return|>", "<|flush|>"]);
    if let Some(id) = vocab.id(b"<|end|>").filter(|_| calls) {
        roles.ends.retain(|&end| end != id);
        vocab.set_kind(id, TokenKind::UserDefined);
    }
    Ok(())
}

/// The roles of a vocabulary out of a folder's file.
pub fn of_folder(tokens: &folder::Tokens, vocab: &mut Vocab) -> Result<Roles, Error> {
    let n_vocab = vocab.len();
    let (ends, beyond): (Vec<u32>, Vec<u32>) = tokens.ends.iter().partition(|&&id| (id as usize) < n_vocab);
    let unusable = |id| format!("ignoring eos_token_id {id}: the vocabulary has {n_vocab} tokens");
    let find = |text: &Option<String>| text.as_ref().and_then(|text| vocab.id(text.as_bytes()));
    let mut roles = Roles {
        bos: find(&tokens.bos),
        eos: find(&tokens.eos),
        pad: find(&tokens.pad),
        unknown: find(&tokens.unknown),
        unusable: beyond.iter().map(unusable).collect(),
        ends,
        ..Roles::default()
    };
    // A model that names one end and no text for it says the same by its id.
    roles.eos = roles.eos.or(roles.ends.first().copied());
    complete(&mut roles, vocab, |_| Ok(None))?;
    Ok(roles)
}
