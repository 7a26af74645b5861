//! Model folders: `config.json` and safetensors files, as Hugging Face and MLX write them.
//!
//! The weights are in `model.safetensors`, or in the files that `model.safetensors.index.json` names. Tensors keep the
//! names they have there; a quantized weight and its planes of scales and biases become one tensor. Other texts of the
//! folder are read on request. Knows the layout of folders, but not what a tensor is for.

mod compressed;
mod config;
mod packed;
mod quantized;
mod safetensors;
mod source;
mod transposed;

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use crate::bytes::{Bytes, Slice};
use crate::error::printable;
use crate::repacked::Repacked;
use crate::{Checkpoint, Error, File, Kind, Open};

use safetensors::Entry;
pub(crate) use source::Folder;

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Maximum number of files of a model.
const MAX_SHARDS: usize = 4096;

/// Returns the folder of a path: the path itself, or the parent of a file of a model folder; `None` for other files.
pub(crate) fn of(path: &Path) -> Option<PathBuf> {
    if path.is_dir() {
        return Some(path.into());
    }
    let name = path.file_name()?.to_str()?;
    let shard = name.starts_with("model") && name.ends_with(".safetensors");
    (name == CONFIG || name == INDEX || shard).then(|| match path.parent() {
        Some(parent) if parent != Path::new("") => parent.into(),
        _ => PathBuf::from("."),
    })
}

/// Opens a folder on disk.
pub(crate) fn open(folder: PathBuf, open: Open) -> Result<Checkpoint, Error> {
    let name = folder.display().to_string();
    read(name, Folder::Disk(folder), open)
}

/// Opens buffers as the files of a folder.
pub(crate) fn from_files(name: &str, files: Vec<(&str, Vec<u8>)>) -> Result<Checkpoint, Error> {
    let files = files.into_iter().map(|(name, bytes)| (name.to_string(), Bytes::aligned(bytes))).collect();
    read(name.into(), Folder::Memory(name.into(), files), Open::default())
}

fn read(name: String, folder: Folder, open: Open) -> Result<Checkpoint, Error> {
    let Some(text) = folder.text(CONFIG)? else {
        return Err(Error::file(&name, format!("is a folder without {CONFIG}")));
    };
    let meta = config::metadata(&folder.name(CONFIG), &text)?;
    let mut shards = shards(&name, &folder)?;
    let formats = shards.formats.iter();
    let written_by_mlx = formats.flatten().any(|format| format == "mlx");
    let kind = match written_by_mlx || meta.iter().any(|(key, _)| key.starts_with(quantized::PREFIX)) {
        true => Kind::Mlx,
        false => Kind::Hf,
    };
    let path = |file: usize| shards.files[file].path().to_string_lossy().into_owned();
    let mut matrices = quantized::float8(&meta, &shards.entries)?;
    matrices.extend(packed::packed(&meta, &shards.entries, path)?);
    matrices.extend(compressed::compressed(&meta, &shards.entries, path)?);
    matrices.extend(transposed::transposed(&shards.entries));
    let parts: HashSet<&String> = matrices.iter().flat_map(|matrix| &matrix.parts).collect();
    shards.entries.retain(|entry| !parts.contains(&entry.name));
    let (mut tensors, mut unreadable) = quantized::join(&meta, shards.entries, path)?;
    packed::refuse(&meta, &mut unreadable);
    if !matrices.is_empty() {
        let (repacked, more) = Repacked::new(matrices, &shards.files, shards.files.len(), open.exact)?;
        shards.files.push(File::computed(folder.path(WEIGHTS), repacked));
        tensors.extend(more);
    }
    Checkpoint::assemble(name, kind, open, shards.files, meta, tensors, unreadable, Some(folder))
}

/// The weights' files, open.
struct Shards {
    files: Vec<File>,
    formats: Vec<Option<String>>,
    entries: Vec<Entry>,
}

fn shards(name: &str, folder: &Folder) -> Result<Shards, Error> {
    let mut shards = Shards { files: Vec::new(), formats: Vec::new(), entries: Vec::new() };
    match folder.file(WEIGHTS)? {
        Some(file) => shards.add(file)?,
        None => shards.add_indexed(name, folder)?,
    }
    for module in crate::DENSE {
        if let Some(file) = folder.file(&format!("{module}/{WEIGHTS}"))? {
            let first = shards.entries.len();
            shards.add(file)?;
            shards.entries[first..].iter_mut().for_each(|entry| entry.name.insert_str(0, &format!("{module}.")));
        }
    }
    Ok(shards)
}

impl Shards {
    /// Adds the files that the index names.
    fn add_indexed(&mut self, name: &str, folder: &Folder) -> Result<(), Error> {
        let index_name = folder.name(INDEX);
        let Some(text) = folder.text(INDEX)? else {
            return self.add_numbered(name, folder);
        };
        let index = safetensors::index(&index_name, &text)?;
        let mut files: Vec<&str> = index.iter().map(|(_, file)| file.as_str()).collect();
        files.sort_unstable();
        files.dedup();
        if files.is_empty() || files.len() > MAX_SHARDS {
            let what = format!("names {} files, 1 to {MAX_SHARDS} are allowed", files.len());
            return Err(Error::file(&index_name, what));
        }
        for file in &files {
            let shown = printable(file.as_bytes());
            if !is_plain(file) {
                return Err(Error::file(&index_name, format!("file {shown} is not the name of a file in the folder")));
            }
            let Some(file) = folder.file(file)? else {
                return Err(Error::file(&index_name, format!("file {shown} is missing in the folder")));
            };
            self.add(file)?;
        }
        check_index(&index_name, &index, &files, &self.entries)
    }

    /// Adds files that their names number, where there is no index.
    fn add_numbered(&mut self, name: &str, folder: &Folder) -> Result<(), Error> {
        let part = |i: usize, n: usize| format!("model-{i:05}-of-{n:05}.safetensors");
        for n in 1..=MAX_SHARDS {
            let Some(first) = folder.file(&part(1, n))? else { continue };
            self.add(first)?;
            for i in 2..=n {
                let missing = || Error::file(name, format!("file {} is missing in the folder", part(i, n)));
                self.add(folder.file(&part(i, n))?.ok_or_else(missing)?)?;
            }
            return Ok(());
        }
        Err(Error::file(name, format!("has neither {WEIGHTS} nor {INDEX}")))
    }

    fn add(&mut self, file: File) -> Result<(), Error> {
        let header = safetensors::header(&file, self.files.len())?;
        self.files.push(file);
        self.formats.push(header.format);
        self.entries.extend(header.entries);
        Ok(())
    }
}

/// Checks that every tensor is in the file that the index names.
fn check_index(name: &str, index: &[(String, String)], files: &[&str], entries: &[Entry]) -> Result<(), Error> {
    let held: HashMap<(&str, usize), ()> = entries.iter().map(|e| ((e.name.as_str(), e.file), ())).collect();
    for (tensor, file) in index {
        let at = files.binary_search(&file.as_str()).unwrap_or(files.len());
        if !held.contains_key(&(tensor.as_str(), at)) {
            return Err(Error::tensor(name, tensor, format!("is missing in {}", printable(file.as_bytes()))));
        }
    }
    Ok(())
}

/// Returns whether `name` is a plain file name, without a path.
fn is_plain(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && !name.contains(['/', '\\', '\0', ':'])
}

/// Reads a text of the folder; `None` when there is no file of that name.
pub(crate) fn side_file(folder: &Folder, name: &str) -> Result<Option<Slice>, Error> {
    match is_plain(name) || crate::INNER_FILES.contains(&name) {
        true => folder.text(name),
        false => Err(Error::file(&folder.name(name), "is not the name of a file in the folder")),
    }
}

/// Reads any other file of the folder.
pub(crate) fn side_bytes(folder: &Folder, name: &str) -> Result<Option<Vec<u8>>, Error> {
    side_file(folder, name).map(|file| file.map(|bytes| bytes.to_vec()))
}

/// Returns a JSON error in one line.
fn json_error(error: &serde_json::Error) -> String {
    const LIMIT: usize = 200;
    let text = error.to_string();
    match text.char_indices().nth(LIMIT) {
        Some((end, _)) => format!("{}… at line {} column {}", &text[..end], error.line(), error.column()),
        None => text,
    }
}
