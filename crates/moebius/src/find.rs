//! Models by name: what Hugging Face's, LM Studio's and Ollama's programs, or `moebius pull`, have fetched to this
//! machine. Only looks; what fetches is `hub`, when the user says so.

use std::collections::HashSet;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use serde_json::Value;

use crate::args::{ModelArgs, NamedArgs};
use crate::hub::is_part;
use crate::input;
use crate::out::note;

/// Entries of folders that are looked at in the caches of a program: a bound for homes that are not as they should be.
const MAX_ENTRIES: usize = 20_000;
/// Longest manifest of Ollama's that is read.
const MAX_MANIFEST_BYTES: u64 = 1 << 20;
/// Longest name of a revision of Hugging Face's that is read.
const MAX_REVISION_BYTES: u64 = 1 << 10;

/// A model on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// What `-m` takes: `org/repo`, `org/repo:Q4_K_M` or `qwen3:30b`.
    pub name: String,
    /// Whose cache it is in.
    pub source: &'static str,
    /// The file, or the folder.
    pub path: PathBuf,
}

/// The folders of the programs that fetch models.
#[derive(Clone, Debug, Default)]
pub struct Caches {
    pub hugging_face: Vec<PathBuf>,
    pub lm_studio: Vec<PathBuf>,
    pub ollama: Vec<PathBuf>,
}

impl Caches {
    /// Returns where they are on this machine.
    pub fn here() -> Caches {
        let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let home = std::env::home_dir().unwrap_or_default();
        let hub = variable("HF_HUB_CACHE").or_else(|| Some(hugging_face_home()?.join("hub")));
        let hub = hub.unwrap_or_else(|| PathBuf::from(".cache/huggingface/hub"));
        let ollama = variable("OLLAMA_MODELS").map_or_else(
            || vec![home.join(".ollama/models"), PathBuf::from("/usr/share/ollama/.ollama/models")],
            |folder| vec![folder],
        );
        Caches {
            hugging_face: vec![hub],
            lm_studio: vec![home.join(".lmstudio/models"), home.join(".cache/lm-studio/models")],
            ollama,
        }
    }

    /// Returns all models in them, by name.
    pub fn list(&self) -> Vec<Found> {
        let mut look = Look::default();
        look.caches("Hugging Face", |look| self.hugging_face.iter().for_each(|folder| look.hugging_face(folder)));
        look.caches("LM Studio", |look| self.lm_studio.iter().for_each(|folder| look.lm_studio(folder)));
        look.caches("Ollama", |look| self.ollama.iter().for_each(|folder| look.ollama(folder)));
        look.found.sort_by(|a, b| (a.name.to_lowercase(), a.source).cmp(&(b.name.to_lowercase(), b.source)));
        look.found.dedup_by(|a, b| a.path == b.path);
        look.found
    }

    /// Returns the one model that a name means.
    ///
    /// # Errors
    /// Says what there is, where several models or none have the name.
    pub fn find(&self, name: &str) -> Result<PathBuf> {
        let wanted = normalized(name);
        let all = self.list();
        let matching: Vec<&Found> = all.iter().filter(|found| matches(&found.name, &wanted)).collect();
        // As Ollama's and llama.cpp's programs choose where no type is named.
        let preferred = ["latest", "q4_k_m"].iter().find_map(|tag| {
            let mut of = matching.iter().filter(|f| f.name.to_lowercase().ends_with(&format!(":{tag}")));
            of.next().filter(|_| of.next().is_none())
        });
        match (matching.as_slice(), preferred) {
            ([one], _) => Ok(one.path.clone()),
            ([], _) => bail!("{}", not_there(name, &wanted)),
            (_, Some(one)) => Ok(one.path.clone()),
            (several, None) => {
                let names: Vec<&str> = several.iter().map(|found| found.name.as_str()).take(20).collect();
                bail!("{name:?} is ambiguous; it matches: {}", names.join(", "))
            }
        }
    }
}

/// Returns the folder of Hugging Face's programs.
pub fn hugging_face_home() -> Option<PathBuf> {
    let named = std::env::var_os("HF_HOME").filter(|value| !value.is_empty()).map(PathBuf::from);
    named.or_else(|| Some(std::env::home_dir()?.join(".cache/huggingface")))
}

/// Returns a name without the address of the hub, or `hf:`, in front and slashes after.
pub fn without_hub(name: &str) -> &str {
    let prefixes = ["https://", "http://", "huggingface.co/", "hf.co/", "hf:"];
    let rest = prefixes.iter().fold(name, |rest, prefix| rest.strip_prefix(prefix).unwrap_or(rest));
    rest.trim_end_matches('/')
}

/// Returns repository, revision and file that an address of the hub's names: `ORG/REPO/resolve/REVISION/FILE`, as links
/// to download have it, `ORG/REPO/blob/REVISION/FILE`, as the browser shows it, or `ORG/REPO/tree/REVISION`.
pub fn hub_address(name: &str) -> Option<(&str, &str, Option<&str>)> {
    if is_of_another_host(name) {
        return None;
    }
    let rest = without_hub(name);
    let rest = rest.split_once(['?', '#']).map_or(rest, |(rest, _)| rest);
    let at = rest.match_indices('/').nth(1)?.0;
    let (kind, rest_of) = rest[at + 1..].split_once('/')?;
    match (kind, rest_of.split_once('/')) {
        ("resolve" | "blob" | "raw", Some((revision, file))) => Some((&rest[..at], revision, Some(file))),
        ("tree", None) => Some((&rest[..at], rest_of, None)),
        _ => None,
    }
}

/// Returns whether a name is an address that is not the hub's.
fn is_of_another_host(name: &str) -> bool {
    name.split_once("://")
        .is_some_and(|(_, rest)| !["huggingface.co/", "hf.co/"].iter().any(|hub| rest.starts_with(hub)))
}

/// Returns whether a text names a model rather than asks something: a file of one, a folder, or `NAME:TAG` or
/// `ORG/REPO` as other programs have it.
pub fn looks_like_model(text: &str) -> bool {
    if text.contains(char::is_whitespace) {
        return false;
    }
    let path = Path::new(text);
    if path.extension().is_some_and(|ext| ext.eq_ignore_ascii_case("gguf")) || path.join("config.json").is_file() {
        return true;
    }
    let is_word = |word: &str| {
        let is_known = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
        word.starts_with(|c: char| c.is_ascii_alphabetic()) && word.bytes().all(is_known)
    };
    let has_digit = |word: &str| word.bytes().any(|b| b.is_ascii_digit());
    let rest = without_hub(text);
    if is_of_another_host(text) {
        return false;
    }
    let (name, tag) = rest.split_once(':').map_or((rest, None), |(name, tag)| (name, Some(tag)));
    match name.split('/').collect::<Vec<_>>().as_slice() {
        [one] => is_word(one) && tag.is_some_and(|tag| tag == "latest" || has_digit(tag) && !tag.contains('/')),
        [org, repo] => is_word(org) && is_word(repo) && (tag.is_some() || has_digit(repo) && repo.contains('-')),
        _ => hub_address(text).is_some(),
    }
}

/// As [`resolve`]; a model of Hugging Face's that is not here is fetched: with `pull`, or when the user, asked on a
/// terminal, says so.
///
/// # Errors
/// As [`resolve`], and where fetching fails.
pub fn resolve_or_pull(path: &Path, pull: bool) -> Result<PathBuf> {
    let missing = match resolve(path) {
        Ok(found) if found.exists() || !is_name(path) => return Ok(found),
        Ok(_) => None,
        Err(error) => Some(error),
    };
    let error = || missing.unwrap_or_else(|| anyhow::anyhow!("failed to find {}: no such file", path.display()));
    let Ok(wanted) = crate::hub::Wanted::parse(&path.to_string_lossy(), "main") else { return Err(error()) };
    let asks = std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
    if !is_name(path) || !(pull || asks) {
        return Err(error());
    }
    let hub = crate::hub::Hub::here()?;
    if pull {
        return hub.pull(&wanted);
    }
    let Ok(listing) = hub.list(&wanted) else { return Err(error()) };
    let size = crate::machine::bytes(hub.size(&wanted, &listing)?);
    crate::out::aside(&format!("moebius: {} is not here. Fetch {size} from Hugging Face? [y/N] ", path.display()));
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    match answer.trim().to_lowercase().as_str() {
        "y" | "yes" => hub.fetch(&wanted, &listing),
        _ => Err(error()),
    }
}

impl ModelArgs {
    /// Returns where the model is, which is downloaded where it is missing and the user agrees.
    ///
    /// # Errors
    /// As [`resolve_or_pull`].
    pub fn path(&self) -> Result<Option<PathBuf>> {
        self.model.as_deref().map(|path| resolve_or_pull(path, self.pull)).transpose()
    }
}

impl NamedArgs {
    /// As [`ModelArgs::path`].
    ///
    /// # Errors
    /// Likewise.
    pub fn path(&self) -> Result<Option<PathBuf>> {
        let model = self.named.clone().or_else(|| self.model.model.clone());
        ModelArgs { model, ..self.model }.path()
    }
}

/// Returns whether what a user wrote may be the name of a model and is no path of a file.
fn is_name(path: &Path) -> bool {
    let is_path = path.is_absolute() || [".", "..", "~"].iter().any(|start| path.starts_with(start));
    hub_address(&path.to_string_lossy()).is_some() || !is_file_name(path) && !is_path
}

/// Returns whether a name is that of a file of a model.
fn is_file_name(path: &Path) -> bool {
    path.extension().is_some_and(|e| ["gguf", "safetensors", "json"].iter().any(|known| e == *known))
}

/// Returns the file or folder that a user named: a path, a path under `~`, a folder that holds one GGUF file, or the
/// name of a model in a cache.
///
/// # Errors
/// A sentence that says what there is, or how to get what is not there.
pub fn resolve(path: &Path) -> Result<PathBuf> {
    resolve_in(path, &Caches::here())
}

fn resolve_in(path: &Path, caches: &Caches) -> Result<PathBuf> {
    let home = path.strip_prefix("~").ok().and_then(|rest| Some(std::env::home_dir()?.join(rest)));
    let path = home.as_deref().unwrap_or(path);
    if path.is_dir() && !path.join("config.json").exists() {
        return only_gguf(path);
    }
    if path.exists() {
        let is_part = path.extension().is_some_and(|e| e == "safetensors" || e == "json");
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        if is_part && !folder.join("config.json").exists() {
            bail!(
                "failed to open {}: it is part of a model folder, but there is no config.json next to it",
                path.display()
            );
        }
        return Ok(path.to_path_buf());
    }
    let name = path.to_string_lossy();
    if let Some((repo, _, file)) = hub_address(&name) {
        // What is in a cache has the name of its repository and its type.
        let kind = file.and_then(|file| type_of(Path::new(file)));
        return caches.find(&kind.map_or_else(|| repo.to_string(), |kind| format!("{repo}:{kind}")));
    }
    let is_file = is_file_name(path) && !is_of_another_host(&name);
    match is_file || path.is_absolute() || name.starts_with('.') || name.len() > 500 {
        // The error of opening it says what is wrong.
        true => Ok(path.to_path_buf()),
        false => caches.find(&name),
    }
}

/// Returns the models of a folder: GGUF files, and folders with safetensors, itself and two levels down.
///
/// # Errors
/// There are none.
pub fn in_folder(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut look = Look::default();
    look.repository(folder, "", "", 2);
    match look.found.is_empty() {
        true => bail!("failed to find models in {}: it holds no GGUF file and no model folder", folder.display()),
        false => Ok(look.found.into_iter().map(|found| found.path).collect()),
    }
}

/// Returns the GGUF file of a folder that has one, or the first part of a split one.
fn only_gguf(folder: &Path) -> Result<PathBuf> {
    let mut look = Look::default();
    let files: Vec<PathBuf> = look.entries(folder).into_iter().filter(|path| is_model_gguf(path)).collect();
    match files.as_slice() {
        // The error of opening it names what is missing.
        [] => Ok(folder.to_path_buf()),
        [one] => Ok(one.clone()),
        several => {
            let names = several.iter().filter_map(|path| path.file_name()).map(|name| name.to_string_lossy());
            let names: Vec<_> = names.take(20).collect();
            bail!("failed to open {}: it holds several models; name one of {}", folder.display(), names.join(", "))
        }
    }
}

/// Returns how to get a model that is not here.
fn not_there(name: &str, wanted: &str) -> String {
    let head = format!("{name} is neither a file nor a downloaded model");
    let (repo, tag) = wanted.split_once(':').unwrap_or((wanted, ""));
    let is_hub = ["huggingface.co/", "hf.co/"].iter().any(|host| name.contains(&format!("//{host}")));
    if (name.starts_with("http://") || name.starts_with("https://")) && !is_hub {
        return format!("{head}; download the file first and name its path");
    }
    match (repo.contains('/'), tag) {
        // As it was written: a hub tells letters apart that a cache does not.
        (true, _) => format!("{head}; `moebius pull {}` downloads it", without_hub(name)),
        (false, "") => format!("{head}; `moebius models` lists downloaded models"),
        (false, tag) => format!("{head}; `ollama pull {repo}:{tag}` downloads it"),
    }
}

/// Returns a name without the parts that go without saying, in lower case.
fn normalized(name: &str) -> String {
    let name = name.to_lowercase();
    let rest = without_hub(&name);
    rest.strip_prefix("library/").unwrap_or(rest).to_string()
}

/// Returns whether a model's name is what a user wrote: all of it, without its type, or without who made it.
fn matches(name: &str, wanted: &str) -> bool {
    let name = normalized(name);
    let bare = |name: &str| name.split_once(':').map_or(name.to_string(), |(repo, _)| repo.to_string());
    let short = |name: &str| name.rsplit_once('/').map_or(name.to_string(), |(_, repo)| repo.to_string());
    [name.clone(), bare(&name), short(&name), short(&bare(&name))].iter().any(|form| form == wanted)
}

/// Returns whether a path is a model in one GGUF file, or the first part of a split one.
fn is_model_gguf(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let Some(stem) = name.strip_suffix(".gguf") else { return false };
    let is_later_part = stem.rsplit_once("-of-").is_some_and(|(head, _)| {
        let part = head.rsplit('-').next().unwrap_or_default();
        part.len() == 5 && part.bytes().all(|b| b.is_ascii_digit()) && part != "00001"
    });
    !stem.contains("mmproj") && !is_later_part
}

/// Returns the weight type in a file's name: `Q4_K_M` of `Qwen3-30B-A3B-Q4_K_M-00001-of-00002.gguf`.
pub fn type_of(path: &Path) -> Option<String> {
    let stem = path.file_stem()?.to_string_lossy().into_owned();
    let is_type = |word: &&str| {
        let upper = word.to_uppercase();
        let known = ["F16", "BF16", "F32", "MXFP4", "NVFP4", "FP16"].contains(&upper.as_str());
        let after = upper.strip_prefix("IQ").or(upper.strip_prefix("TQ")).or(upper.strip_prefix('Q'));
        known || after.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    stem.split(['-', '.']).rev().find(is_type).map(str::to_uppercase)
}

struct Look {
    left: usize,
    found: Vec<Found>,
    /// Folders that were looked at, by their real paths: links may lead back to them.
    seen: HashSet<PathBuf>,
}

impl Default for Look {
    fn default() -> Look {
        Look { left: MAX_ENTRIES, found: Vec::new(), seen: HashSet::new() }
    }
}

impl Look {
    /// Looks at the caches of one program, which take nothing from those of others.
    fn caches(&mut self, whose: &str, look: impl FnOnce(&mut Look)) {
        self.left = MAX_ENTRIES;
        look(self);
        if self.left == 0 {
            note!(
                "the caches of {whose} have more than {MAX_ENTRIES} files and folders; models in the rest are not found"
            );
        }
    }

    /// Returns what a folder holds, in order; nothing where it cannot be read.
    fn entries(&mut self, folder: &Path) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().take(self.left);
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        self.left -= paths.len();
        paths.sort();
        paths
    }

    /// Models below a folder that belongs to `repo`: its GGUF files, or the folder itself where it holds safetensors.
    fn repository(&mut self, folder: &Path, repo: &str, source: &'static str, depth: usize) {
        if !folder.canonicalize().is_ok_and(|real| self.seen.insert(real)) {
            return;
        }
        let entries = self.entries(folder);
        let any = |fits: &dyn Fn(&str) -> bool| {
            entries.iter().any(|path| path.file_name().and_then(|f| f.to_str()).is_some_and(fits))
        };
        let is_weights = |name: &str| {
            ["model.safetensors", "model.safetensors.index.json"].contains(&name) || name.starts_with("model-00001-of-")
        };
        if any(&|name| name == "config.json") && any(&is_weights) {
            self.found.push(Found { name: repo.into(), source, path: folder.to_path_buf() });
        }
        for path in entries {
            if is_model_gguf(&path) && path.is_file() {
                let name = match type_of(&path) {
                    Some(kind) => format!("{repo}:{kind}"),
                    None => format!("{repo}:{}", path.file_stem().unwrap_or_default().to_string_lossy()),
                };
                self.found.push(Found { name, source, path });
            } else if depth > 0 && path.is_dir() {
                self.repository(&path, repo, source, depth - 1);
            }
        }
    }

    /// `models--ORG--REPO/snapshots/REVISION/..`; the revision that `refs/main` names, else the newest.
    fn hugging_face(&mut self, hub: &Path) {
        for folder in self.entries(hub) {
            let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let Some(repo) = name.strip_prefix("models--").map(|rest| rest.replacen("--", "/", 1)) else { continue };
            let main = input::found(&folder.join("refs/main"), MAX_REVISION_BYTES).ok();
            // A revision is a name in that folder, and leads nowhere else.
            let main = main.filter(|revision| is_part(revision.trim()));
            let main = main.map(|revision| folder.join("snapshots").join(revision.trim()));
            let newest = |folders: Vec<PathBuf>| {
                folders.into_iter().max_by_key(|path| path.metadata().and_then(|meta| meta.modified()).ok())
            };
            let is_inside = |path: &PathBuf| path.symlink_metadata().is_ok_and(|meta| meta.is_dir());
            let all = |look: &mut Look| look.entries(&folder.join("snapshots")).into_iter().filter(is_inside).collect();
            let snapshot = main.filter(is_inside).or_else(|| newest(all(self)));
            if let Some(snapshot) = snapshot {
                self.repository(&snapshot, &repo, "Hugging Face", 2);
            }
        }
    }

    /// `ORG/REPO/..`.
    fn lm_studio(&mut self, models: &Path) {
        for org in self.entries(models) {
            for folder in self.entries(&org) {
                let part = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                let repo = format!("{}/{}", part(&org), part(&folder));
                self.repository(&folder, &repo, "LM Studio", 1);
            }
        }
    }

    /// `manifests/HOST/NAMESPACE/MODEL/TAG`, each a JSON file that names blobs by hash.
    fn ollama(&mut self, models: &Path) {
        let manifests = models.join("manifests");
        for host in self.entries(&manifests) {
            for namespace in self.entries(&host) {
                for model in self.entries(&namespace) {
                    for tag in self.entries(&model) {
                        self.manifest(models, &tag);
                    }
                }
            }
        }
    }

    fn manifest(&mut self, models: &Path, tag: &Path) {
        let Ok(manifest) = input::found(tag, MAX_MANIFEST_BYTES) else { return };
        let manifest: Value = serde_json::from_str(&manifest).unwrap_or_default();
        let layers = manifest["layers"].as_array().into_iter().flatten();
        let is_model = |layer: &&Value| layer["mediaType"] == "application/vnd.ollama.image.model";
        let digest = layers.filter(is_model).find_map(|layer| layer["digest"].as_str()?.strip_prefix("sha256:"));
        // Nothing but a hash leads out of a manifest.
        let Some(digest) = digest.filter(|hash| hash.bytes().all(|b| b.is_ascii_hexdigit())) else { return };
        let path = models.join("blobs").join(format!("sha256-{digest}"));
        let parts: Vec<_> = tag.iter().rev().take(4).map(|part| part.to_string_lossy()).collect();
        let [tag, model, namespace, host] = parts.as_slice() else { return };
        let name = match (host.as_ref(), namespace.as_ref()) {
            ("registry.ollama.ai", "library") => format!("{model}:{tag}"),
            ("registry.ollama.ai", namespace) => format!("{namespace}/{model}:{tag}"),
            (host, namespace) => format!("{host}/{namespace}/{model}:{tag}"),
        };
        if path.is_file() {
            self.found.push(Found { name, source: "Ollama", path });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, files: &[&str]) {
        for file in files {
            let path = root.join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "x").unwrap();
        }
    }

    #[test]
    fn models_are_found_by_the_names_people_type() {
        let home = tempfile::tempdir().unwrap();
        let hub = "hf/models--Qwen--Qwen3-30B-A3B-GGUF/snapshots/abc";
        write(
            home.path(),
            &[
                &format!("{hub}/Qwen3-30B-A3B-Q4_K_M.gguf"),
                &format!("{hub}/Qwen3-30B-A3B-Q8_0-00001-of-00002.gguf"),
                &format!("{hub}/Qwen3-30B-A3B-Q8_0-00002-of-00002.gguf"),
                &format!("{hub}/mmproj-F16.gguf"),
                "hf/models--Qwen--Qwen3-30B-A3B-GGUF/snapshots/old/Qwen3-30B-A3B-Q2_K.gguf",
                "hf/models--mlx-community--Qwen3-30B-A3B-4bit/snapshots/1/config.json",
                "hf/models--mlx-community--Qwen3-30B-A3B-4bit/snapshots/1/model.safetensors.index.json",
                "hf/models--o--numbered/snapshots/1/config.json",
                "hf/models--o--numbered/snapshots/1/model-00001-of-00001.safetensors",
                "lm/google/gemma-4/gemma-4-26B-A4B-it-IQ4_XS.gguf",
                "ol/blobs/sha256-0a",
                "ol/blobs/sha256-0b",
            ],
        );
        std::fs::create_dir_all(home.path().join("hf/models--Qwen--Qwen3-30B-A3B-GGUF/refs")).unwrap();
        std::fs::write(home.path().join("hf/models--Qwen--Qwen3-30B-A3B-GGUF/refs/main"), "abc\n").unwrap();
        for (at, hash) in [("registry.ollama.ai/library/qwen3/30b", "0a"), ("hf.co/unsloth/gemma/latest", "0b")] {
            let path = home.path().join("ol/manifests").join(at);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            let layer = |kind: &str, hash: &str| serde_json::json!({"mediaType": format!("application/vnd.ollama.image.{kind}"), "digest": format!("sha256:{hash}")});
            let manifest = serde_json::json!({"layers": [layer("license", "0c"), layer("model", hash)]});
            std::fs::write(path, manifest.to_string()).unwrap();
        }
        let evil = home.path().join("ol/manifests/registry.ollama.ai/library/evil/latest");
        std::fs::create_dir_all(evil.parent().unwrap()).unwrap();
        std::fs::write(
            evil,
            r#"{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../x"}]}"#,
        )
        .unwrap();
        let caches = Caches {
            hugging_face: vec![home.path().join("hf")],
            lm_studio: vec![home.path().join("lm"), home.path().join("none")],
            ollama: vec![home.path().join("ol")],
        };
        let names: Vec<String> = caches.list().into_iter().map(|found| found.name).collect();
        assert_eq!(
            names,
            [
                "google/gemma-4:IQ4_XS",
                "hf.co/unsloth/gemma:latest",
                "mlx-community/Qwen3-30B-A3B-4bit",
                "o/numbered",
                "Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M",
                "Qwen/Qwen3-30B-A3B-GGUF:Q8_0",
                "qwen3:30b",
            ]
        );
        for (name, end) in [
            ("Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M", "A3B-Q4_K_M.gguf"),
            ("Qwen/Qwen3-30B-A3B-GGUF", "A3B-Q4_K_M.gguf"),
            ("hf.co/qwen/qwen3-30b-a3b-gguf:q8_0", "Q8_0-00001-of-00002.gguf"),
            ("https://huggingface.co/Qwen/Qwen3-30B-A3B-GGUF", "A3B-Q4_K_M.gguf"),
            ("Qwen3-30B-A3B-4bit", "snapshots/1"),
            (
                "https://huggingface.co/Qwen/Qwen3-30B-A3B-GGUF/resolve/main/Qwen3-30B-A3B-Q4_K_M.gguf?download=true",
                "A3B-Q4_K_M.gguf",
            ),
            ("https://hf.co/mlx-community/Qwen3-30B-A3B-4bit/tree/main", "snapshots/1"),
            ("qwen3:30b", "blobs/sha256-0a"),
            ("qwen3", "blobs/sha256-0a"),
            ("unsloth/gemma", "blobs/sha256-0b"),
            ("gemma-4", "IQ4_XS.gguf"),
        ] {
            let path = resolve_in(Path::new(name), &caches).unwrap();
            assert!(path.ends_with(end) || path.to_string_lossy().ends_with(end), "{name}: {}", path.display());
        }
        for (name, part) in [
            ("Qwen/Qwen3-235B-GGUF:q4_k_m", "`moebius pull Qwen/Qwen3-235B-GGUF:q4_k_m` downloads it"),
            ("hf:mlx-community/Qwen3-4bit", "`moebius pull mlx-community/Qwen3-4bit` downloads it"),
            ("https://huggingface.co/Qwen/Qwen3/", "`moebius pull Qwen/Qwen3` downloads it"),
            ("llama3:8b", "`ollama pull llama3:8b`"),
            ("https://example.com/x", "download the file first"),
            ("https://example.com/x.gguf", "download the file first"),
            ("nothing", "`moebius models`"),
        ] {
            let error = resolve_in(Path::new(name), &caches).unwrap_err().to_string();
            assert!(error.contains(part), "{name}: {error}");
        }
        // Paths stay what they are, and a folder with one model is that model.
        assert_eq!(resolve_in(Path::new("./x.gguf"), &caches).unwrap(), Path::new("./x.gguf"));
        assert_eq!(resolve_in(Path::new("x.gguf"), &caches).unwrap(), Path::new("x.gguf"));
        let folder = home.path().join("lm/google/gemma-4");
        assert!(resolve_in(&folder, &caches).unwrap().ends_with("gemma-4-26B-A4B-it-IQ4_XS.gguf"));
        let several = resolve_in(&home.path().join(hub), &caches).unwrap_err().to_string();
        assert!(several.contains("several models") && several.contains("Q8_0-00001"), "{several}");
    }

    #[test]
    fn models_are_told_from_prompts() {
        for name in [
            "qwen3:30b",
            "llama3:latest",
            "Qwen/Qwen3-4B-GGUF",
            "Qwen/Qwen3-4B-GGUF:Q4_K_M",
            "hf.co/unsloth/gemma-3-4b-it-GGUF",
            "https://huggingface.co/o/r/resolve/main/x.gguf",
            "x.gguf",
            "models/x.GGUF",
        ] {
            assert!(looks_like_model(name), "{name}");
        }
        for prompt in
            ["hi", "hello:", "either/or", "12:30", "What is 3:1?", "a:b", "https://example.com/3", "and/or-2 x"]
        {
            assert!(!looks_like_model(prompt), "{prompt}");
        }
        let of = |name| hub_address(name);
        assert_eq!(of("hf.co/o/r/blob/dev/a/b.gguf"), Some(("o/r", "dev", Some("a/b.gguf"))));
        assert_eq!(of("https://huggingface.co/o/r/tree/v2/"), Some(("o/r", "v2", None)));
        for name in [
            "https://example.com/r/tree/main",
            "o/r",
            "o/r:Q4",
            "https://huggingface.co/o/r",
            "o/r/resolve/main",
            "a/b/c/d",
            "",
        ] {
            assert_eq!(of(name), None, "{name}");
        }
    }

    /// Links that lead back list nothing twice, and one program's caches hide no other's.
    #[cfg(unix)]
    #[test]
    fn every_cache_is_looked_at_once() {
        let home = tempfile::tempdir().unwrap();
        write(home.path(), &["lm/o/m/m-Q4_0.gguf", "hf/x"]);
        for (link, to) in [("lm/o/m/back", "."), ("lm/o/m/up", ".."), ("lm/o/again", "m")] {
            std::os::unix::fs::symlink(to, home.path().join(link)).unwrap();
        }
        for n in 0..=MAX_ENTRIES {
            std::fs::create_dir(home.path().join(format!("hf/{n}"))).unwrap();
        }
        let [hf, lm] = ["hf", "lm"].map(|name| vec![home.path().join(name)]);
        let caches = Caches { hugging_face: hf, lm_studio: lm, ..Caches::default() };
        let found: Vec<String> = caches.list().into_iter().map(|found| found.name).collect();
        assert_eq!(found.len(), 1, "{found:?}");
        let folder = in_folder(&home.path().join("lm/o/m")).unwrap();
        assert_eq!(folder.len(), 1, "{folder:?}");
    }

    /// A revision is a folder among the snapshots. Whatever else `refs/main` is or names leads nowhere.
    #[cfg(unix)]
    #[test]
    fn references_lead_out_of_no_cache() {
        let home = tempfile::tempdir().unwrap();
        write(home.path(), &["out/x-Q4_0.gguf", "hf/models--o--m/snapshots/abc/m-Q4_K_M.gguf"]);
        let repo = home.path().join("hf/models--o--m");
        std::os::unix::fs::symlink(home.path().join("out"), repo.join("snapshots/link")).unwrap();
        std::fs::create_dir(repo.join("refs")).unwrap();
        let (main, out) = (repo.join("refs/main"), home.path().join("out"));
        let caches = Caches { hugging_face: vec![home.path().join("hf")], ..Caches::default() };
        let names = || caches.list().into_iter().map(|found| found.name).collect::<Vec<_>>();
        for revision in
            ["abc", "../../../out", "../../../../out", &out.to_string_lossy(), "link", ".", "..", "", "abc/.."]
        {
            std::fs::write(&main, revision).unwrap();
            assert_eq!(names(), ["o/m:Q4_K_M"], "{revision:?}");
        }
        for make in ["mkfifo \"$0\"", "ln -s /dev/zero \"$0\"", "mkdir \"$0\""] {
            std::fs::remove_file(&main).unwrap();
            let made = std::process::Command::new("sh").args(["-c", make]).arg(&main).status().unwrap();
            assert!(made.success());
            assert_eq!(names(), ["o/m:Q4_K_M"], "{make}");
        }
    }
}
