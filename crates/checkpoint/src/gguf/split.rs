//! Models split over files `NAME-00001-of-0000N.gguf`: finds the other parts and checks that they belong together.
//!
//! Each part is a complete GGUF file with the keys `split.no` (from 0), `split.count` and `split.tensors.count`; the
//! first part holds the model's metadata.

use std::path::{Path, PathBuf};

use super::{file, read, scaled};
use crate::{Checkpoint, Error, Kind, Metadata, Open};

const NO_KEY: &str = "split.no";
const COUNT_KEY: &str = "split.count";
const TENSORS_KEY: &str = "split.tensors.count";

/// Place of a file in a split model, from its name.
pub(super) struct Place {
    prefix: String, // the file name up to "-00001-of-00003.gguf"
    no: u32,        // from 1
    pub count: u32,
}

impl Place {
    /// `None` for a name without part numbers.
    pub(super) fn of(path: &Path) -> Option<Self> {
        let stem = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (prefix, no) = rest.rsplit_once('-')?;
        let number = |digits: &str| match digits.len() == 5 && digits.bytes().all(|b| b.is_ascii_digit()) {
            true => digits.parse().ok(),
            false => None,
        };
        Some(Self { prefix: prefix.into(), no: number(no)?, count: number(count)? })
    }

    fn sibling(&self, path: &Path, no: u32) -> PathBuf {
        path.with_file_name(format!("{}-{no:05}-of-{:05}.gguf", self.prefix, self.count))
    }
}

/// Opens all parts of the model that `path` is a part of. `name` is the model's name in messages.
pub(super) fn open(name: String, path: &Path, place: &Place, open: Open) -> Result<Checkpoint, Error> {
    if !(1..=place.count).contains(&place.no) {
        let what = format!("the name says part {} of {}", place.no, place.count);
        return Err(Error::file(&name, what));
    }
    let (mut files, mut tensors, mut unreadable, mut meta) = (Vec::new(), Vec::new(), Vec::new(), None);
    let mut n_tensor = None;
    for no in 1..=place.count {
        let path = place.sibling(path, no);
        let (shown, file) = (path.display().to_string(), file(&path)?);
        let part = read::header(&shown, &file, files.len())?;
        check_part(&shown, &part.meta, no, place.count)?;
        let said = part.meta.opt_u64(TENSORS_KEY)?;
        if let (Some(said), Some(first)) = (said, n_tensor)
            && said != first
        {
            let what = format!("{TENSORS_KEY} is {said}, the first part says {first}");
            return Err(Error::file(&shown, what));
        }
        n_tensor = n_tensor.or(said);
        tensors.extend(part.tensors);
        unreadable.extend(part.unreadable);
        meta.get_or_insert(part.meta);
        files.push(file);
    }
    let held = tensors.len() + unreadable.len();
    if let Some(said) = n_tensor
        && said != held as u64
    {
        let what = format!("{TENSORS_KEY} is {said}, the {} parts hold {held}", place.count);
        return Err(Error::file(&name, what));
    }
    // The loop ran at least once: `place.no` lies in `1..=place.count`.
    let meta = meta.ok_or_else(|| Error::file(&name, "has no part"))?;
    let (files, tensors) = scaled::join(files, tensors)?;
    Checkpoint::assemble(name, Kind::Gguf, open, files, meta, tensors, unreadable, None)
}

/// Checks the part numbers in the metadata against the name.
fn check_part(file: &str, meta: &Metadata, no: u32, count: u32) -> Result<(), Error> {
    let (said_no, said_count) = (meta.opt_u64(NO_KEY)?, meta.opt_u64(COUNT_KEY)?);
    let (Some(said_no), Some(said_count)) = (said_no, said_count) else {
        let what = format!("the name says part {no} of {count}, but {NO_KEY} or {COUNT_KEY} is missing in the file");
        return Err(Error::file(file, what));
    };
    match said_no.checked_add(1) == Some(u64::from(no)) && said_count == u64::from(count) {
        true => Ok(()),
        false => Err(Error::file(
            file,
            format!(
                "the name says part {no} of {count}, but {NO_KEY} is {said_no} (from 0) and {COUNT_KEY} {said_count}"
            ),
        )),
    }
}

/// Checks that a file opened alone is a whole model.
pub(super) fn check_whole(file: &str, meta: &Metadata) -> Result<(), Error> {
    match meta.opt_u64(COUNT_KEY)? {
        Some(count) if count > 1 => {
            let no = meta.opt_u64(NO_KEY)?.unwrap_or(0);
            let what = format!(
                "holds one part of {count} ({NO_KEY} is {no}, from 0): the parts are found by their names, \
                 NAME-00001-of-{count:05}.gguf and so on"
            );
            Err(Error::file(file, what))
        }
        _ => Ok(()),
    }
}
