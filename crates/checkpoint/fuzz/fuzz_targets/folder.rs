//! Fuzz target: a folder of any `config.json`, any safetensors header and any index ends in a model or an error. The
//! input is the three texts with a zero byte between them. `tests/fuzz_open.rs` is its quick form.
#![no_main]

#[allow(dead_code)] // the valid folder is the quick form's
#[path = "../../tests/exercise_folder/mod.rs"]
mod exercise_folder;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let mut texts = bytes.splitn(3, |&byte| byte == 0).map(<[u8]>::to_vec);
    let mut text = || texts.next().unwrap_or_default();
    let (config, header, index) = (text(), text(), text());
    exercise_folder::exercise_folder(config, header.len() as u64, header, index);
});
