//! Which files of a repository a name means: `org/repo:Q4_K_M` the GGUF file of that type with all its parts,
//! `org/repo` the one GGUF file, or the usual type of several, or the folder of a model in safetensors.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use super::{File, Listing};
use crate::find;

/// Types that are taken where nobody names one, best first: those of a good size for their loss.
const USUAL: [&str; 5] = ["Q4_K_M", "MXFP4", "Q4_K_S", "Q4_0", "Q8_0"];

/// What a user wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// `org/repo`.
    pub repo: String,
    /// The type of a GGUF file, or a part of its name.
    pub tag: Option<String>,
    /// The path of a file in the repository, as addresses have it.
    pub file: Option<String>,
    pub revision: String,
}

impl Wanted {
    /// Reads `org/repo`, `org/repo:TYPE`, with the address of the hub or `hf:` in front, or the address of a file or a
    /// revision there; that revision goes before `revision`.
    ///
    /// # Errors
    /// It is no such name.
    pub fn parse(name: &str, revision: &str) -> Result<Wanted> {
        let (rest, revision, file) = match find::hub_address(name) {
            Some((repo, named, file)) => (repo, named, file),
            None => (find::without_hub(name), revision, None),
        };
        let (repo, tag) = match rest.split_once(':') {
            Some((repo, tag)) => (repo, Some(tag.to_string())),
            None => (rest, None),
        };
        let is_part = |part: &str| {
            let known = part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
            known && (1..=96).contains(&part.len()) && !part.starts_with('.') && !part.contains("..")
        };
        let parts: Vec<&str> = repo.split('/').collect();
        ensure!(
            parts.len() == 2 && parts.iter().all(|part| is_part(part) && !part.contains("--")),
            "failed to fetch {name}: expected ORG/REPO or ORG/REPO:TYPE of Hugging Face (Ollama's registry is not asked), \
             for example Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M"
        );
        ensure!(tag.as_deref().is_none_or(is_part), "failed to fetch {name}: the text after the colon is not a type");
        ensure!(
            super::cache::is_plain(revision) && revision.split('/').all(is_part),
            "failed to fetch {name}: {revision} is not a revision"
        );
        ensure!(
            file.is_none_or(super::cache::is_plain),
            "failed to fetch {name}: it does not name a file of the repository"
        );
        Ok(Wanted { repo: repo.into(), tag, file: file.map(String::from), revision: revision.into() })
    }
}

/// Returns the files that are requested; parts of a split file in their order.
///
/// # Errors
/// There are none, or those of several models; the sentence says what there is.
pub fn files<'l>(listing: &'l Listing, wanted: &Wanted) -> Result<Vec<&'l File>> {
    let models = gguf(listing);
    if let Some(path) = wanted.file.as_deref().filter(|path| path.to_lowercase().ends_with(".gguf")) {
        let of = models.values().find(|parts| parts.iter().any(|file| file.path == path));
        let of = of.with_context(|| format!("failed to fetch {}: it has no file {path}", wanted.repo))?;
        return whole(of.clone(), wanted);
    }
    if wanted.file.is_some() {
        return folder(listing, wanted);
    }
    let chosen = match &wanted.tag {
        Some(tag) => {
            let is_type = |name: &str| find::type_of(Path::new(name)).is_some_and(|t| t.eq_ignore_ascii_case(tag));
            let is_named = |name: &str| name.to_lowercase().contains(&tag.to_lowercase());
            let by = |is: &dyn Fn(&str) -> bool| models.iter().filter(|(name, _)| is(name)).collect::<Vec<_>>();
            let exact = by(&is_type);
            let found = if exact.is_empty() { by(&is_named) } else { exact };
            match found.as_slice() {
                [one] => one.1.clone(),
                [] => bail!(
                    "failed to fetch {}: it has no GGUF file of type {tag}; there are {}",
                    wanted.repo,
                    types(&models)
                ),
                several => {
                    let names: Vec<&str> = several.iter().map(|(name, _)| name.as_str()).take(10).collect();
                    bail!("failed to fetch {}: {tag} matches several files: {}", wanted.repo, names.join(", "))
                }
            }
        }
        None if models.is_empty() => return folder(listing, wanted),
        None if models.len() == 1 => models.values().next().cloned().unwrap_or_default(),
        None => {
            let of = |usual: &&str| {
                let is = |name: &&String| find::type_of(Path::new(name)).as_deref() == Some(usual);
                let mut found = models.keys().filter(is);
                found.next().filter(|_| found.next().is_none()).cloned()
            };
            let name = USUAL.iter().find_map(of);
            let name = name.with_context(|| {
                format!("failed to fetch {}: name a type after a colon; there are {}", wanted.repo, types(&models))
            })?;
            models.get(&name).cloned().unwrap_or_default()
        }
    };
    whole(chosen, wanted)
}

/// GGUF models by their name without the number of the part.
fn gguf(listing: &Listing) -> BTreeMap<String, Vec<&File>> {
    let mut models: BTreeMap<String, Vec<&File>> = BTreeMap::new();
    for file in &listing.files {
        let lower = file.path.to_lowercase();
        if lower.ends_with(".gguf") && !lower.contains("mmproj") && !lower.contains("imatrix") {
            let name = place(&file.path).map_or_else(|| file.path.clone(), |(stem, ..)| format!("{stem}.gguf"));
            models.entry(name).or_default().push(file);
        }
    }
    models
}

/// Name, number and count of `NAME-00001-of-00003.gguf`.
fn place(path: &str) -> Option<(&str, usize, usize)> {
    let stem = path.get(..path.len().checked_sub(5)?)?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (name, number) = rest.rsplit_once('-')?;
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    if !digits(count) || !digits(number) { None } else { Some((name, number.parse().ok()?, count.parse().ok()?)) }
}

/// Checks that all parts of a split model are there.
fn whole<'l>(mut files: Vec<&'l File>, wanted: &Wanted) -> Result<Vec<&'l File>> {
    files.sort_by(|a, b| a.path.cmp(&b.path));
    let first = files.first().with_context(|| format!("failed to fetch {}: it has no such files", wanted.repo))?;
    if let Some((name, _, count)) = place(&first.path) {
        let is_whole = files.len() == count
            && files
                .iter()
                .enumerate()
                .all(|(i, file)| place(&file.path).is_some_and(|(_, n, of)| (n, of) == (i + 1, count)));
        ensure!(
            is_whole,
            "failed to fetch {}: {name} is in {count} parts, and the repository does not have each once",
            wanted.repo
        );
    }
    Ok(files)
}

fn types(models: &BTreeMap<String, Vec<&File>>) -> String {
    let name = |path: &String| find::type_of(Path::new(path)).unwrap_or_else(|| path.clone());
    let names: Vec<String> = models.keys().map(name).take(40).collect();
    if names.is_empty() { "none at all".into() } else { names.join(", ") }
}

/// Returns the files of a folder of safetensors that are read.
fn folder<'l>(listing: &'l Listing, wanted: &Wanted) -> Result<Vec<&'l File>> {
    let has = |name: &str| listing.files.iter().any(|file| file.path == name);
    let is_wanted = |file: &&File| {
        let path = file.path.as_str();
        let is_weights =
            path.ends_with(".safetensors") && !path.starts_with("consolidated") && !path.starts_with("adapter");
        let is_text = [".json", ".jinja"].iter().any(|end| path.ends_with(end)) || path == "tiktoken.model";
        !path.contains('/') && (is_weights || is_text) || checkpoint::INNER_FILES.contains(&path)
    };
    let mut files: Vec<&File> = listing.files.iter().filter(is_wanted).collect();
    let has_weights = files.iter().any(|file| file.path.ends_with(".safetensors"));
    ensure!(
        has("config.json") && has_weights,
        "failed to fetch {}: it holds neither a GGUF file nor a folder of config.json and safetensors",
        wanted.repo
    );
    // Small files first: they say whether the model runs. The first is in the model's folder itself.
    files.sort_by_key(|file| (file.path.ends_with(".safetensors"), file.path.contains('/'), &file.path));
    Ok(files)
}
