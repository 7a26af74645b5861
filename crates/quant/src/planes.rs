//! Rows of weights as byte slices, one per plane. Knows no format.

use std::ops::Range;

/// The encoded bytes of one row, or of several rows that follow each other in every plane.
///
/// Types of GGUF files keep whole blocks in `q` and have nothing in the other planes; they come from a plain slice by
/// [`From`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Planes<'a> {
    /// Blocks, or the packed integers of a planar type.
    pub q: &'a [u8],
    /// Scales of the groups of a planar type.
    pub scales: &'a [u8],
    /// Biases of the groups of an affine type.
    pub biases: &'a [u8],
}

/// Mutable [`Planes`].
#[derive(Debug, Default)]
#[allow(missing_docs)]
pub struct PlanesMut<'a> {
    pub q: &'a mut [u8],
    pub scales: &'a mut [u8],
    pub biases: &'a mut [u8],
}

/// Bytes in each plane. Of a row, see [`crate::WeightType::plane_bytes`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct PlaneBytes {
    pub q: usize,
    pub scales: usize,
    pub biases: usize,
}

impl PlaneBytes {
    /// Bytes in all planes together.
    pub fn total(self) -> usize {
        self.q + self.scales + self.biases
    }

    /// Bytes of `n` rows; `None` when a number does not fit.
    pub fn times(self, n: usize) -> Option<Self> {
        self.total().checked_mul(n)?;
        Some(Self { q: self.q * n, scales: self.scales * n, biases: self.biases * n })
    }
}

impl<'a> Planes<'a> {
    /// Rows `rows` of these, which are `each` long.
    ///
    /// # Panics
    /// When they end past a plane.
    pub fn rows(self, each: PlaneBytes, rows: Range<usize>) -> Self {
        Self {
            q: &self.q[rows.start * each.q..rows.end * each.q],
            scales: &self.scales[rows.start * each.scales..rows.end * each.scales],
            biases: &self.biases[rows.start * each.biases..rows.end * each.biases],
        }
    }

    /// As [`Planes::rows`]; `None` when they end past a plane.
    pub fn get(self, each: PlaneBytes, rows: Range<usize>) -> Option<Self> {
        let end = each.times(rows.end)?;
        let len = self.len();
        let fits = rows.start <= rows.end && end.q <= len.q && end.scales <= len.scales && end.biases <= len.biases;
        fits.then(|| self.rows(each, rows))
    }

    /// Row `i` of these, which are `each` long.
    ///
    /// # Panics
    /// When it ends past a plane.
    pub fn row(self, each: PlaneBytes, i: usize) -> Self {
        self.rows(each, i..i + 1)
    }

    /// Bytes in each plane.
    pub fn len(self) -> PlaneBytes {
        PlaneBytes { q: self.q.len(), scales: self.scales.len(), biases: self.biases.len() }
    }

    /// Returns whether no plane holds a byte.
    pub fn is_empty(self) -> bool {
        self.len() == PlaneBytes::default()
    }
}

impl<'a> PlanesMut<'a> {
    /// Row `i` of these, which are `each` long.
    ///
    /// # Panics
    /// When it ends past a plane.
    pub fn row_mut(&mut self, each: PlaneBytes, i: usize) -> PlanesMut<'_> {
        PlanesMut {
            q: &mut self.q[i * each.q..(i + 1) * each.q],
            scales: &mut self.scales[i * each.scales..(i + 1) * each.scales],
            biases: &mut self.biases[i * each.biases..(i + 1) * each.biases],
        }
    }

    /// Bytes in each plane.
    pub fn len(&self) -> PlaneBytes {
        PlaneBytes { q: self.q.len(), scales: self.scales.len(), biases: self.biases.len() }
    }

    /// Returns whether no plane holds a byte.
    pub fn is_empty(&self) -> bool {
        self.len() == PlaneBytes::default()
    }
}

impl<'a> From<&'a [u8]> for Planes<'a> {
    fn from(q: &'a [u8]) -> Self {
        Self { q, ..Self::default() }
    }
}

impl<'a> From<&'a Vec<u8>> for Planes<'a> {
    fn from(q: &'a Vec<u8>) -> Self {
        q.as_slice().into()
    }
}

impl<'a> From<&'a mut [u8]> for PlanesMut<'a> {
    fn from(q: &'a mut [u8]) -> Self {
        Self { q, ..Self::default() }
    }
}

impl<'a> From<&'a mut Vec<u8>> for PlanesMut<'a> {
    fn from(q: &'a mut Vec<u8>) -> Self {
        q.as_mut_slice().into()
    }
}

/// Owned encoded bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct PlanesBuf {
    pub q: Vec<u8>,
    pub scales: Vec<u8>,
    pub biases: Vec<u8>,
}

impl PlanesBuf {
    /// Zero bytes.
    pub fn new(bytes: PlaneBytes) -> Self {
        Self { q: vec![0; bytes.q], scales: vec![0; bytes.scales], biases: vec![0; bytes.biases] }
    }

    /// Borrows them.
    pub fn get(&self) -> Planes<'_> {
        Planes { q: &self.q, scales: &self.scales, biases: &self.biases }
    }

    /// Borrows them mutably.
    pub fn get_mut(&mut self) -> PlanesMut<'_> {
        PlanesMut { q: &mut self.q, scales: &mut self.scales, biases: &mut self.biases }
    }
}
