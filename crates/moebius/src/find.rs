//! Models by name: what Hugging Face's, LM Studio's and Ollama's programs, or `moebius pull`, have fetched to this
//! machine. Only looks; what fetches is `hub`, when the user says so.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use serde_json::Value;

/// Entries of folders that are looked at, over all caches: a bound for homes that are not as they should be.
const MAX_ENTRIES: usize = 20_000;
/// Longest manifest of Ollama's that is read.
const MAX_MANIFEST_BYTES: u64 = 1 << 20;

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
    /// Where they are on this machine.
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

    /// All models in them, by name.
    pub fn list(&self) -> Vec<Found> {
        let mut look = Look { left: MAX_ENTRIES, found: Vec::new() };
        self.hugging_face.iter().for_each(|folder| look.hugging_face(folder));
        self.lm_studio.iter().for_each(|folder| look.lm_studio(folder));
        self.ollama.iter().for_each(|folder| look.ollama(folder));
        look.found.sort_by(|a, b| (a.name.to_lowercase(), a.source).cmp(&(b.name.to_lowercase(), b.source)));
        look.found.dedup_by(|a, b| a.path == b.path);
        look.found
    }

    /// The one model that a name means.
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
                bail!("find {name}: it is the name of several models: {}", names.join(", "))
            }
        }
    }
}

/// The folder of Hugging Face's programs.
pub fn hugging_face_home() -> Option<PathBuf> {
    let named = std::env::var_os("HF_HOME").filter(|value| !value.is_empty()).map(PathBuf::from);
    named.or_else(|| Some(std::env::home_dir()?.join(".cache/huggingface")))
}

/// A name without the address of the hub, or `hf:`, in front and slashes behind.
pub fn without_hub(name: &str) -> &str {
    let prefixes = ["https://", "http://", "huggingface.co/", "hf.co/", "hf:"];
    let rest = prefixes.iter().fold(name, |rest, prefix| rest.strip_prefix(prefix).unwrap_or(rest));
    rest.trim_end_matches('/')
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
    let error = || missing.unwrap_or_else(|| anyhow::anyhow!("find {}: there is no such file", path.display()));
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

/// Whether what a user wrote may be the name of a model and is no path of a file.
fn is_name(path: &Path) -> bool {
    !is_file_name(path)
        && !path.is_absolute()
        && !path.starts_with(".")
        && !path.starts_with("..")
        && !path.starts_with("~")
}

/// Whether a name is that of a file of a model.
fn is_file_name(path: &Path) -> bool {
    path.extension().is_some_and(|e| ["gguf", "safetensors", "json"].iter().any(|known| e == *known))
}

/// The file or folder that a user named: a path, a path under `~`, a folder that holds one GGUF file, or the name of a
/// model in a cache.
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
            bail!("open {}: it is a part of a model folder, and there is no config.json beside it", path.display());
        }
        return Ok(path.to_path_buf());
    }
    let name = path.to_string_lossy();
    match is_file_name(path) || path.is_absolute() || name.starts_with('.') || name.len() > 500 {
        // The error of opening it says what is wrong.
        true => Ok(path.to_path_buf()),
        false => caches.find(&name),
    }
}

/// The models of a folder: GGUF files, and folders with safetensors, itself and two levels down.
///
/// # Errors
/// There are none.
pub fn in_folder(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut look = Look { left: MAX_ENTRIES, found: Vec::new() };
    look.repository(folder, "", "", 2);
    match look.found.is_empty() {
        true => bail!("find models in {}: it holds no GGUF file and no model folder", folder.display()),
        false => Ok(look.found.into_iter().map(|found| found.path).collect()),
    }
}

/// The GGUF file of a folder that has one, or the first part of a split one.
fn only_gguf(folder: &Path) -> Result<PathBuf> {
    let mut look = Look { left: MAX_ENTRIES, found: Vec::new() };
    let files: Vec<PathBuf> = look.entries(folder).into_iter().filter(|path| is_model_gguf(path)).collect();
    match files.as_slice() {
        // The error of opening it names what is missing.
        [] => Ok(folder.to_path_buf()),
        [one] => Ok(one.clone()),
        several => {
            let names = several.iter().filter_map(|path| path.file_name()).map(|name| name.to_string_lossy());
            let names: Vec<_> = names.take(20).collect();
            bail!("open {}: it holds several models: name one of {}", folder.display(), names.join(", "))
        }
    }
}

/// How to get a model that is not here.
fn not_there(name: &str, wanted: &str) -> String {
    let head = format!("find {name}: it is no file, and no model in the caches of Hugging Face, LM Studio or Ollama");
    let (repo, tag) = wanted.split_once(':').unwrap_or((wanted, ""));
    let is_hub = ["huggingface.co/", "hf.co/"].iter().any(|host| name.contains(&format!("//{host}")));
    if (name.starts_with("http://") || name.starts_with("https://")) && !is_hub {
        return format!("{head}; fetch the file first, and give its path");
    }
    match (repo.contains('/'), tag) {
        // As it was written: a hub tells letters apart that a cache does not.
        (true, _) => format!("{head}; `moebius pull {}` fetches it", without_hub(name)),
        (false, "") => format!("{head}; `moebius models` lists those that are here"),
        (false, tag) => format!("{head}; `ollama pull {repo}:{tag}` fetches it"),
    }
}

/// A name without the parts that go without saying, in lower case.
fn normalized(name: &str) -> String {
    let name = name.to_lowercase();
    let rest = without_hub(&name);
    rest.strip_prefix("library/").unwrap_or(rest).to_string()
}

/// Whether a model's name is what a user wrote: all of it, without its type, or without who made it.
fn matches(name: &str, wanted: &str) -> bool {
    let name = normalized(name);
    let bare = |name: &str| name.split_once(':').map_or(name.to_string(), |(repo, _)| repo.to_string());
    let short = |name: &str| name.rsplit_once('/').map_or(name.to_string(), |(_, repo)| repo.to_string());
    [name.clone(), bare(&name), short(&name), short(&bare(&name))].iter().any(|form| form == wanted)
}

/// Whether a path is a model in one GGUF file, or the first part of a split one.
fn is_model_gguf(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let Some(stem) = name.strip_suffix(".gguf") else { return false };
    let is_later_part = stem.rsplit_once("-of-").is_some_and(|(head, _)| {
        let part = head.rsplit('-').next().unwrap_or_default();
        part.len() == 5 && part.bytes().all(|b| b.is_ascii_digit()) && part != "00001"
    });
    !stem.contains("mmproj") && !is_later_part
}

/// The weight type in a file's name: `Q4_K_M` of `Qwen3-30B-A3B-Q4_K_M-00001-of-00002.gguf`.
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
}

impl Look {
    /// What a folder holds, in order; nothing where it cannot be read.
    fn entries(&mut self, folder: &Path) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().take(self.left);
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        self.left -= paths.len();
        paths.sort();
        paths
    }

    /// Models below a folder that belongs to `repo`: its GGUF files, or the folder itself where it holds safetensors.
    fn repository(&mut self, folder: &Path, repo: &str, source: &'static str, depth: usize) {
        let entries = self.entries(folder);
        let is = |name: &str| entries.iter().any(|path| path.file_name().is_some_and(|file| file == name));
        if is("config.json") && (is("model.safetensors") || is("model.safetensors.index.json")) {
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
            let main = std::fs::read_to_string(folder.join("refs/main")).ok();
            let main = main.map(|revision| folder.join("snapshots").join(revision.trim()));
            let newest = |folders: Vec<PathBuf>| {
                folders.into_iter().max_by_key(|path| path.metadata().and_then(|meta| meta.modified()).ok())
            };
            let snapshot =
                main.filter(|path| path.is_dir()).or_else(|| newest(self.entries(&folder.join("snapshots"))));
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
        if !tag.metadata().is_ok_and(|meta| meta.is_file() && meta.len() <= MAX_MANIFEST_BYTES) {
            return;
        }
        let Ok(manifest) = std::fs::read(tag) else { return };
        let manifest: Value = serde_json::from_slice(&manifest).unwrap_or_default();
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
            ("qwen3:30b", "blobs/sha256-0a"),
            ("qwen3", "blobs/sha256-0a"),
            ("unsloth/gemma", "blobs/sha256-0b"),
            ("gemma-4", "IQ4_XS.gguf"),
        ] {
            let path = resolve_in(Path::new(name), &caches).unwrap();
            assert!(path.ends_with(end) || path.to_string_lossy().ends_with(end), "{name}: {}", path.display());
        }
        for (name, part) in [
            ("Qwen/Qwen3-235B-GGUF:q4_k_m", "`moebius pull Qwen/Qwen3-235B-GGUF:q4_k_m` fetches it"),
            ("hf:mlx-community/Qwen3-4bit", "`moebius pull mlx-community/Qwen3-4bit` fetches it"),
            ("https://huggingface.co/Qwen/Qwen3/", "`moebius pull Qwen/Qwen3` fetches it"),
            ("llama3:8b", "`ollama pull llama3:8b`"),
            ("https://example.com/x", "fetch the file first"),
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
}
