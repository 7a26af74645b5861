//! Models from Hugging Face: which files a name means (`choose.rs`), how they come over the network (`client.rs`), and
//! where they lie (`cache.rs`).
//!
//! The hub is not trusted: names of files cannot leave the cache, what is fetched has the size and the hash that were
//! announced or is thrown away, and the user's token goes to the hub alone.

mod cache;
mod choose;
mod client;
mod sink;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use indicatif::ProgressStyle;
use serde::Deserialize;

use crate::{input, machine};
use cache::Cache;
pub use cache::is_part;
pub use choose::Wanted;
use client::{Client, Origin};

/// Longest answer about a repository, in bytes; those of the largest have some 2 MB.
const MAX_LISTING: u64 = 32 << 20;
/// Maximum number of files of a repository.
const MAX_FILES: usize = 50_000;
/// Longest file that a token is read from.
const MAX_TOKEN_BYTES: u64 = 4 << 10;
/// Bytes that stay free on the disk.
const KEPT_FREE: u64 = 64 << 20;

/// A file of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// Its path in the repository, of plain parts.
    pub path: String,
    pub size: u64,
    pub hash: Hash,
}

/// What a file's bytes must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hash {
    /// SHA-256 of a large file.
    Sha256(String),
    /// Git's name of a small one: SHA-1 behind a header with its length.
    Git(String),
}

impl Hash {
    /// In hexadecimal digits: the file's name among the blobs.
    pub fn hex(&self) -> &str {
        match self {
            Self::Sha256(hex) | Self::Git(hex) => hex,
        }
    }
}

/// A revision of a repository.
pub struct Listing {
    pub commit: String,
    pub files: Vec<File>,
}

/// A hub, a token for it and a cache.
pub struct Hub {
    client: Client,
    cache: Cache,
    offline: bool,
}

impl Hub {
    /// As the variables of Hugging Face's programs say: `HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_CACHE`, `HF_HOME`,
    /// `HF_HUB_OFFLINE`.
    ///
    /// # Errors
    /// A variable holds what cannot be used.
    pub fn here() -> Result<Hub> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let is_on = |name: &str| {
            let value = variable(name).unwrap_or_default().to_lowercase();
            ["1", "on", "yes", "true"].contains(&value.as_str())
        };
        let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        let origin = Origin::parse(&endpoint).with_context(|| format!("failed to use HF_ENDPOINT {endpoint}"))?;
        let token = if is_on("HF_HUB_DISABLE_IMPLICIT_TOKEN") { None } else { token()? };
        let folder = crate::find::Caches::here().hugging_face.into_iter().next().context("there is no cache")?;
        Ok(Hub {
            client: Client::new(origin, token, client::Patience::default())?,
            cache: Cache::new(folder),
            offline: is_on("HF_HUB_OFFLINE"),
        })
    }

    /// Returns whether the network is forbidden.
    pub fn is_offline(&self) -> bool {
        self.offline
    }

    /// Returns the revision of a repository, as the hub has it.
    ///
    /// # Errors
    /// The hub cannot be reached, refuses, or says what makes no sense.
    pub fn list(&self, wanted: &Wanted) -> Result<Listing> {
        ensure!(
            !self.offline,
            "failed to fetch {}: HF_HUB_OFFLINE forbids the network, and the model is not in the cache",
            wanted.repo
        );
        let path = format!("/api/models/{}/revision/{}?blobs=true", wanted.repo, client::escape(&wanted.revision));
        let body = self.client.text(&path, MAX_LISTING).with_context(|| format!("failed to fetch {}", wanted.repo))?;
        listing(&body).with_context(|| format!("failed to read the hub's listing of {}", wanted.repo))
    }

    /// Fetches the files of a model that are not there yet; the path to open.
    ///
    /// # Errors
    /// The model has no such files, the disk is too small, or a file does not come as it was announced. What was
    /// fetched in whole stays; what came in part is gone on with the next time.
    pub fn fetch(&self, wanted: &Wanted, listing: &Listing) -> Result<PathBuf> {
        let files = choose::files(listing, wanted)?;
        let repo = self.cache.repository(&wanted.repo)?;
        let missing: Vec<&File> = files.iter().copied().filter(|file| !repo.has(file)).collect();
        let total: u64 = missing.iter().map(|file| file.size - repo.partial(file)).sum();
        if let Some(free) = cache::free(repo.folder()) {
            ensure!(
                total.saturating_add(KEPT_FREE) <= free,
                "failed to fetch {}: it needs {}, and {} has {} free",
                wanted.repo,
                machine::bytes(total),
                repo.folder().display(),
                machine::bytes(free)
            );
        }
        let bar = machine::progress(Some(total));
        bar.set_style(ProgressStyle::with_template(
            "{bar:30} {binary_bytes}/{binary_total_bytes}, {binary_bytes_per_sec}, {eta} left",
        )?);
        for file in missing {
            let path = format!("/{}/resolve/{}/{}", wanted.repo, listing.commit, client::escape_path(&file.path));
            repo.store(file, &self.client, &path, &bar).with_context(|| format!("failed to fetch {}", file.path))?;
        }
        bar.finish_and_clear();
        let first = repo.link(&listing.commit, &files)?;
        repo.point(&wanted.revision, &listing.commit)?;
        let is_gguf = files[0].path.to_lowercase().ends_with(".gguf");
        Ok(if is_gguf { first } else { first.parent().map(Path::to_path_buf).unwrap_or(first) })
    }

    /// Lists and fetches.
    ///
    /// # Errors
    /// See [`Hub::list`] and [`Hub::fetch`].
    pub fn pull(&self, wanted: &Wanted) -> Result<PathBuf> {
        self.fetch(wanted, &self.list(wanted)?)
    }

    /// Bytes of a model's files.
    ///
    /// # Errors
    /// The model has no such files.
    pub fn size(&self, wanted: &Wanted, listing: &Listing) -> Result<u64> {
        Ok(choose::files(listing, wanted)?.iter().map(|file| file.size).sum())
    }
}

/// Returns the user's token: a variable, or the file that Hugging Face's programs write.
fn token() -> Result<Option<String>> {
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
    let found = variable("HF_TOKEN").or_else(|| variable("HUGGING_FACE_HUB_TOKEN"));
    let found = found.or_else(|| {
        let beside = || Some(crate::find::hugging_face_home()?.join("token"));
        let path = variable("HF_TOKEN_PATH").map(PathBuf::from).or_else(beside)?;
        input::found(&path, MAX_TOKEN_BYTES).ok()
    });
    let Some(token) = found.map(|token| token.trim().to_string()).filter(|token| !token.is_empty()) else {
        return Ok(None);
    };
    ensure!(
        token.len() <= 1024 && token.bytes().all(|b| b.is_ascii_graphic()),
        "failed to use the token for Hugging Face: it holds blanks, line ends or letters that no token has"
    );
    Ok(Some(token))
}

#[derive(Deserialize)]
struct RawListing {
    sha: String,
    #[serde(default)]
    siblings: Vec<RawFile>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawFile {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<RawLfs>,
}

#[derive(Deserialize)]
struct RawLfs {
    sha256: Option<String>,
    oid: Option<String>,
    size: Option<u64>,
}

/// Reads what a hub says of a revision. Files without size or hash are left out, and so are names that could leave the
/// cache: nothing of theirs can be fetched.
fn listing(body: &str) -> Result<Listing> {
    let raw: RawListing = serde_json::from_str(body)?;
    ensure!(is_hex(&raw.sha, &[40, 64]), "its commit is no hash");
    ensure!(raw.siblings.len() <= MAX_FILES, "it has {} files, at most {MAX_FILES} are allowed", raw.siblings.len());
    let file = |raw: RawFile| {
        let hash = match &raw.lfs {
            Some(lfs) => Hash::Sha256(lfs.sha256.as_ref().or(lfs.oid.as_ref())?.trim_start_matches("sha256:").into()),
            None => Hash::Git(raw.blob_id?),
        };
        let size = raw.lfs.and_then(|lfs| lfs.size).or(raw.size)?;
        let lengths: &[usize] = if matches!(hash, Hash::Sha256(_)) { &[64] } else { &[40] };
        let is_good = is_hex(hash.hex(), lengths) && cache::is_plain(&raw.rfilename);
        is_good.then_some(File { path: raw.rfilename, size, hash })
    };
    let files: Vec<File> = raw.siblings.into_iter().filter_map(file).collect();
    if files.is_empty() {
        bail!("it has no files");
    }
    files.iter().try_fold(0u64, |sum, file| sum.checked_add(file.size)).context("its files are too large")?;
    Ok(Listing { commit: raw.sha, files })
}

fn is_hex(text: &str, lengths: &[usize]) -> bool {
    lengths.contains(&text.len()) && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// How long a connection may say nothing.
const SILENCE: Duration = Duration::from_secs(60);
