//! A file that lies on no disk: matrices that were published in a form that no kernel reads, in the form of a weight
//! type. Its bytes are computed when they are read, from the files that hold the matrices, a piece at a time: whoever
//! reads them keeps them, and nothing else does. Knows no model.

use quant::{Affine, PlaneBytes, ScaleType, WeightType};

use crate::error::printable;
use crate::file::{Computed, File};
use crate::{Error, Extent, Extents, TensorInfo};

/// Where planes begin.
const ALIGN: usize = 64;
/// Bytes of a plane that are computed at a time, at least a row.
const PIECE: usize = 4 << 20;
/// Codes in a word.
const CODES: usize = 8;
/// The zero of codes that have none of their own.
const MIDDLE: u8 = 8;
/// Where AWQ keeps the code of each of eight rows: its words hold rows 0 2 4 6 1 3 5 7.
const AWQ_PLACE: [usize; CODES] = [0, 4, 1, 5, 2, 6, 3, 7];

/// How a [`Packed`] matrix is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Packing {
    /// GPTQ: words `[columns / 8, rows]`, eight columns each, the first in the lowest bits.
    Columns {
        /// Zeros are stored less 1, modulo 16.
        less_one: bool,
    },
    /// AWQ: words `[columns, rows / 8]`, eight rows each: from the lowest bits on rows 0 2 4 6 1 3 5 7.
    Rows,
    /// compressed-tensors: words `[rows, columns / 8]`, eight columns each, the first in the lowest bits; scales
    /// `[rows, groups]`, words of zeros `[rows / 8, groups]`.
    Lines,
}

/// A matrix of 4-bit codes with a scale and a zero for each row and group of columns, as GPTQ, AWQ and
/// compressed-tensors publish them. A weight is `(code - zero) * scale`. Shapes are those of the first two.
#[derive(Clone, Debug)]
pub(crate) struct Packed {
    pub packing: Packing,
    /// Columns of a group, where `groups` says nothing else.
    pub group: usize,
    /// Codes, eight in an i32.
    pub codes: Extent,
    /// Zeros, `[groups, rows / 8]` words; all are 8 where there are none.
    pub zeros: Option<Extent>,
    /// Scales, `[groups, rows]`.
    pub scales: Extent,
    /// Their type: F32, F16 or BF16.
    pub scale_type: WeightType,
    /// The group of each column, `[columns]` i32.
    pub groups: Option<Extent>,
    /// Whether columns of a group need not follow one another.
    pub in_any_order: bool,
}

/// A matrix of 8-bit floats (E4M3) with a scale for each block of rows and columns, as DeepSeek-V3 was published.
#[derive(Clone, Debug)]
pub(crate) struct Float8 {
    /// Its bytes, one a number.
    pub data: Extent,
    /// The scales, `[ceil(rows / block[0]), ceil(columns / block[1])]`.
    pub scales: Extent,
    /// Their type: F32, F16 or BF16.
    pub scale_type: WeightType,
    /// Rows and columns of a block.
    pub block: [usize; 2],
}

/// A matrix of NVFP4 with a scale in a tensor of its own, or a stack of such matrices with one each, as llama.cpp's
/// converter writes them.
#[derive(Clone, Debug)]
pub(crate) struct Fp4 {
    /// Its blocks.
    pub blocks: Extent,
    /// f32, one a matrix.
    pub scales: Extent,
}

/// A stack of matrices whose columns lie one after the other.
#[derive(Clone, Debug)]
pub(crate) struct Transposed {
    /// Its numbers, `[n_stack, columns, rows]`.
    pub data: Extent,
    /// Their type: F32, F16 or BF16.
    pub dtype: WeightType,
    /// Matrices, as many as divide the rows.
    pub n_stack: usize,
}

/// Some columns of a matrix of any type, or of a stack of matrices.
#[derive(Clone, Debug)]
pub(crate) struct Columns {
    /// All its columns.
    pub planes: Extents,
    pub dtype: WeightType,
    /// Columns that it has.
    pub of: usize,
    /// The first that is taken.
    pub first: usize,
}

/// How a matrix was published.
#[derive(Clone, Debug)]
pub(crate) enum Form {
    Packed(Packed),
    Float8(Float8),
    Fp4(Fp4),
    Transposed(Transposed),
    Columns(Columns),
}

/// A matrix that is to be repacked.
#[derive(Clone, Debug)]
pub(crate) struct Matrix {
    /// Name of the tensor that it becomes.
    pub name: String,
    /// Rows and columns; the rows of a stack are those of all its matrices.
    pub shape: [usize; 2],
    pub form: Form,
    /// Names of the tensors that it is stored in.
    pub parts: Vec<String>,
}

/// The file.
#[derive(Debug)]
pub(crate) struct Repacked {
    /// The files that hold the matrices, under the numbers of their extents.
    sources: Vec<File>,
    matrices: Vec<(Matrix, WeightType)>,
    /// Planes in the order of their offsets.
    planes: Vec<Place>,
    size: usize,
}

/// A plane of a matrix in the file.
#[derive(Clone, Copy, Debug)]
struct Place {
    offset: usize,
    len: usize,
    matrix: usize,
    plane: Plane,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plane {
    Q,
    Scales,
    Biases,
}

impl Computed for Repacked {
    fn size(&self) -> usize {
        self.size
    }

    fn read_at(&self, mut offset: usize, mut out: &mut [u8]) -> Result<Option<()>, Error> {
        if offset.checked_add(out.len()).is_none_or(|end| end > self.size) {
            return Ok(None);
        }
        while !out.is_empty() {
            // The plane that holds the byte, or the last one before it.
            let next = self.planes.partition_point(|place| place.offset <= offset);
            let Some(place) = next.checked_sub(1).and_then(|i| self.planes.get(i)) else { return Ok(None) };
            let end = place.offset + place.len;
            if offset >= end {
                let next = self.planes.get(next).map_or(self.size, |next| next.offset);
                let (gap, rest) = out.split_at_mut(out.len().min(next - offset));
                gap.fill(0);
                (offset, out) = (offset + gap.len(), rest);
                continue;
            }
            let (here, rest) = out.split_at_mut(out.len().min(end - offset));
            self.read_plane(place, offset - place.offset, here)?;
            (offset, out) = (offset + here.len(), rest);
        }
        Ok(Some(()))
    }

    fn is_unchanged(&self) -> Result<bool, Error> {
        self.sources.iter().try_fold(true, |same, file| Ok(same && file.is_unchanged()?))
    }
}

impl Repacked {
    /// Returns the file of some matrices, and its tensors, which say that they are in file `number`. `exact`: matrices
    /// that no type holds exactly become F32, not F16.
    ///
    /// # Errors
    /// A matrix contradicts itself or cannot be read.
    pub fn new(
        matrices: Vec<Matrix>,
        files: &[File],
        number: usize,
        exact: bool,
    ) -> Result<(Self, Vec<TensorInfo>), Error> {
        let sources = files.iter().map(File::again).collect::<Result<_, _>>()?;
        let mut file = Self { sources, matrices: Vec::new(), planes: Vec::new(), size: 0 };
        let mut tensors = Vec::new();
        for matrix in matrices {
            let dtype = file.weight_type(&matrix, exact)?;
            let [rows, columns] = matrix.shape;
            let len = dtype.plane_bytes(columns).and_then(|row| row.times(rows));
            let end = len.and_then(|len| file.size.checked_add(len.total().checked_add(3 * ALIGN)?));
            let (Some(len), Some(_)) = (len, end) else {
                return Err(file.error(&matrix, format!("[{rows}, {columns}] is too large for {dtype}")));
            };
            let i = file.matrices.len();
            let q = file.place(i, Plane::Q, len.q);
            let scales = (len.scales > 0).then(|| file.place(i, Plane::Scales, len.scales));
            let biases = (len.biases > 0).then(|| file.place(i, Plane::Biases, len.biases));
            let extent = |(offset, len)| Extent { file: number, offset, len };
            let shape = match &matrix.form {
                Form::Transposed(stack) => vec![stack.n_stack, rows / stack.n_stack, columns],
                Form::Packed(_) | Form::Float8(_) | Form::Fp4(_) | Form::Columns(_) => matrix.shape.to_vec(),
            };
            tensors.push(TensorInfo {
                name: matrix.name.clone(),
                shape,
                dtype,
                file: number,
                offset: q.0,
                len: q.1,
                scales: scales.map(extent),
                biases: biases.map(extent),
            });
            file.matrices.push((matrix, dtype));
        }
        Ok((file, tensors))
    }

    fn place(&mut self, matrix: usize, plane: Plane, len: usize) -> (usize, usize) {
        let offset = self.size.next_multiple_of(ALIGN);
        self.planes.push(Place { offset, len, matrix, plane });
        self.size = offset + len;
        (offset, len)
    }

    /// Returns the type that a matrix becomes: the one that holds its numbers exactly, or floats.
    fn weight_type(&self, matrix: &Matrix, exact: bool) -> Result<WeightType, Error> {
        let columns = matrix.shape[1];
        match &matrix.form {
            Form::Packed(packed) => {
                // A group of the type lies within one of the matrix, of which the last may be cut.
                let divides = |n: &usize| {
                    columns.is_multiple_of(*n) && (packed.group.is_multiple_of(*n) || packed.group >= columns)
                };
                let group = [128, 64, 32].into_iter().find(divides);
                let affine = group.and_then(|group| Affine::new(4, group, ScaleType::F32));
                let floats = if exact { WeightType::F32 } else { WeightType::F16 };
                if packed.in_any_order && self.groups(matrix, packed)?.is_some() {
                    return Ok(floats);
                }
                Ok(affine.map_or(floats, WeightType::Affine))
            }
            Form::Fp4(_) => Ok(WeightType::NVFP4_SCALED),
            Form::Transposed(stack) => Ok(stack.dtype),
            Form::Columns(columns) => Ok(columns.dtype),
            // A group of the type lies within a block of the matrix.
            Form::Float8(float8) => {
                let group = WeightType::F8_E4M3.block_len();
                let fits = columns.is_multiple_of(group)
                    && (float8.block[1].is_multiple_of(group) || float8.block[1] >= columns);
                Ok(if fits { WeightType::F8_E4M3 } else { WeightType::F32 })
            }
        }
    }

    /// Bytes of a plane from `from` on, in whole rows.
    fn read_plane(&self, place: &Place, mut from: usize, mut out: &mut [u8]) -> Result<(), Error> {
        let (matrix, dtype) = &self.matrices[place.matrix];
        let each = place.len / matrix.shape[0];
        let mut rows = Vec::new();
        while !out.is_empty() {
            let first = from / each;
            let n = (from + out.len()).div_ceil(each).min(first + (PIECE / each).max(1)) - first;
            let taken = out.len().min((first + n) * each - from);
            let (here, rest) = out.split_at_mut(taken);
            if here.len() == n * each {
                self.rows(matrix, *dtype, place.plane, first, here)?;
            } else {
                rows.resize(n * each, 0);
                self.rows(matrix, *dtype, place.plane, first, &mut rows)?;
                here.copy_from_slice(&rows[from - first * each..][..taken]);
            }
            (from, out) = (from + taken, rest);
        }
        Ok(())
    }

    /// Rows of a plane from row `first` on.
    fn rows(
        &self,
        matrix: &Matrix,
        dtype: WeightType,
        plane: Plane,
        first: usize,
        out: &mut [u8],
    ) -> Result<(), Error> {
        match (&matrix.form, dtype, plane) {
            (Form::Packed(packed), WeightType::Affine(_), Plane::Q) => self.codes(matrix, packed, first, out),
            (Form::Packed(packed), WeightType::Affine(affine), _) => {
                self.affine(matrix, packed, affine.group(), plane, first, out)
            }
            (Form::Packed(packed), ..) => {
                let values = self.unpacked(matrix, packed, first, out.len() / row_len(matrix, out, dtype))?;
                quant::encode_row(dtype, &values, out);
                Ok(())
            }
            (Form::Fp4(fp4), _, Plane::Q) => {
                let from = fp4.blocks.offset + first * (fp4.blocks.len / matrix.shape[0]);
                self.sources[fp4.blocks.file].read_at(from, out)
            }
            (Form::Fp4(fp4), ..) => self.matrix_scales(matrix, fp4, first, out),
            (Form::Transposed(stack), ..) => self.transposed(matrix, stack, first, out),
            (Form::Columns(columns), ..) => self.columns(matrix, columns, plane, first, out),
            (Form::Float8(float8), WeightType::F8_E4M3, Plane::Q) => {
                self.sources[float8.data.file].read_at(float8.data.offset + first * matrix.shape[1], out)
            }
            (Form::Float8(float8), WeightType::F8_E4M3, _) => self.row_scales(matrix, float8, first, out),
            (Form::Float8(float8), ..) => {
                let values = self.float8(matrix, float8, first, out.len() / row_len(matrix, out, dtype))?;
                quant::encode_row(dtype, &values, out);
                Ok(())
            }
        }
    }

    /// Rows from `first` on of some columns.
    fn columns(
        &self,
        matrix: &Matrix,
        columns: &Columns,
        plane: Plane,
        first: usize,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let (extent, of_plane): (_, fn(PlaneBytes) -> usize) = match plane {
            Plane::Q => (Some(&columns.planes.q), |bytes| bytes.q),
            Plane::Scales => (columns.planes.scales.as_ref(), |bytes| bytes.scales),
            Plane::Biases => (columns.planes.biases.as_ref(), |bytes| bytes.biases),
        };
        let bytes = |n: usize| columns.dtype.plane_bytes(n).map(of_plane);
        let (Some(extent), Some(all), Some(len)) = (extent, bytes(columns.of), bytes(matrix.shape[1])) else {
            return Err(self.error(matrix, "has not the planes of its type".into()));
        };
        // A plane of one scale a row has it for all columns.
        let from = if len == all { 0 } else { bytes(columns.first).unwrap_or(0) };
        let n = out.len() / len;
        let mut rows = vec![0; n * all];
        self.sources[extent.file].read_at(extent.offset + first * all, &mut rows)?;
        for (out, row) in out.chunks_exact_mut(len).zip(rows.chunks_exact(all)) {
            out.copy_from_slice(&row[from..from + len]);
        }
        Ok(())
    }

    /// Codes of rows from `first` on, four bits each in the order of the columns: the plane of affine types.
    fn codes(&self, matrix: &Matrix, packed: &Packed, first: usize, out: &mut [u8]) -> Result<(), Error> {
        /// Rows that share the loads of a cache line.
        const TILE: usize = 16;
        let each = matrix.shape[1] / 2;
        let n = out.len() / each;
        match packed.packing {
            Packing::Columns { .. } => {
                let words = self.words(&packed.codes, [matrix.shape[1] / CODES, matrix.shape[0]], first, n)?;
                for (tile, out) in out.chunks_mut(TILE * each).enumerate() {
                    for (j, words) in words.chunks_exact(n).enumerate() {
                        for (row, word) in out.chunks_exact_mut(each).zip(&words[tile * TILE..]) {
                            row[4 * j..][..4].copy_from_slice(&word.to_le_bytes());
                        }
                    }
                }
            }
            Packing::Lines => self.sources[packed.codes.file].read_at(packed.codes.offset + first * each, out)?,
            Packing::Rows => {
                let (word, end) = (first / CODES, (first + n).div_ceil(CODES));
                let row_words = matrix.shape[0].div_ceil(CODES);
                let n_words = end - word;
                let words = self.words(&packed.codes, [matrix.shape[1], row_words], word, n_words)?;
                for (i, row) in out.chunks_exact_mut(each).enumerate() {
                    let (at, shift) = ((first + i) / CODES - word, 4 * AWQ_PLACE[(first + i) % CODES]);
                    let pairs = words.chunks_exact(2 * n_words);
                    for (byte, pair) in row.iter_mut().zip(pairs) {
                        *byte = (pair[at] >> shift & 15 | (pair[n_words + at] >> shift & 15) << 4) as u8;
                    }
                }
            }
        }
        Ok(())
    }

    /// Scales of rows from `first` on, or their biases `-zero * scale`, f32, in groups of `group` columns.
    fn affine(
        &self,
        matrix: &Matrix,
        packed: &Packed,
        group: usize,
        plane: Plane,
        first: usize,
        out: &mut [u8],
    ) -> Result<(), Error> {
        if self.groups(matrix, packed)?.is_some() {
            return Err(
                self.error(matrix, "g_idx has groups in another order, desc_act says that there is none".into())
            );
        }
        let n_groups = matrix.shape[1] / group;
        let n = out.len() / (4 * n_groups);
        let (scales, zeros) = self.scales_zeros(matrix, packed, first, n)?;
        for (i, row) in out.chunks_exact_mut(4 * n_groups).enumerate() {
            for (g, out) in row.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                let at = g * group / packed.group * n + i;
                let value = if plane == Plane::Scales { scales[at] } else { -f32::from(zeros[at]) * scales[at] };
                *out = value.to_le_bytes();
            }
        }
        Ok(())
    }

    /// Values of `n` rows from `first` on.
    fn unpacked(&self, matrix: &Matrix, packed: &Packed, first: usize, n: usize) -> Result<Vec<f32>, Error> {
        let columns = matrix.shape[1];
        let groups = self.groups(matrix, packed)?;
        let group = |column: usize| groups.as_ref().map_or(column / packed.group, |groups| groups[column] as usize);
        let (scales, zeros) = self.scales_zeros(matrix, packed, first, n)?;
        if !columns.is_multiple_of(2) {
            return Err(self.error(matrix, format!("has an odd number of columns, {columns}")));
        }
        let mut codes = vec![0; n * columns / 2];
        self.codes(matrix, packed, first, &mut codes)?;
        let mut values = vec![0.0; n * columns];
        for (i, (row, codes)) in values.chunks_exact_mut(columns).zip(codes.chunks_exact(columns / 2)).enumerate() {
            for (column, value) in row.iter_mut().enumerate() {
                let at = group(column) * n + i;
                let code = codes[column / 2] >> (4 * (column % 2)) & 15;
                *value = (f32::from(code) - f32::from(zeros[at])) * scales[at];
            }
        }
        Ok(values)
    }

    /// Scales and zeros of `n` rows from `first` on, `[groups, n]`.
    fn scales_zeros(
        &self,
        matrix: &Matrix,
        packed: &Packed,
        first: usize,
        n: usize,
    ) -> Result<(Vec<f32>, Vec<u8>), Error> {
        let [n_rows, n_columns] = matrix.shape;
        let n_groups = n_columns.div_ceil(packed.group);
        let each = packed.scale_type.block_bytes();
        let is_by_row = packed.packing == Packing::Lines;
        let raw = match is_by_row {
            true => self.strided(
                &packed.scales,
                [1, n_rows * n_groups * each],
                first * n_groups * each,
                n * n_groups * each,
            )?,
            false => self.strided(&packed.scales, [n_groups, n_rows * each], first * each, n * each)?,
        };
        let mut scales = vec![0.0; n_groups * n];
        quant::decode_row(packed.scale_type, &raw, &mut scales);
        if is_by_row {
            let by_row = scales.clone();
            scales.iter_mut().enumerate().for_each(|(at, scale)| *scale = by_row[at % n * n_groups + at / n]);
        }
        let Some(zeros) = &packed.zeros else { return Ok((scales, vec![MIDDLE; n_groups * n])) };
        let (word, end) = (first / CODES, (first + n).div_ceil(CODES));
        let (n_words, row_words) = (end - word, n_rows.div_ceil(CODES));
        let words = match is_by_row {
            true => self.words(zeros, [1, row_words * n_groups], word * n_groups, n_words * n_groups)?,
            false => self.words(zeros, [n_groups, row_words], word, n_words)?,
        };
        let less = u32::from(packed.packing == Packing::Columns { less_one: true });
        let zero = |at: usize| {
            let (group, row) = (at / n, first + at % n);
            let place = if packed.packing == Packing::Rows { AWQ_PLACE[row % CODES] } else { row % CODES };
            let in_group = row / CODES - word;
            let word = words[if is_by_row { in_group * n_groups + group } else { group * n_words + in_group }];
            ((word >> (4 * place) & 15) + less) as u8 & 15
        };
        let zeros = (0..n_groups * n).map(zero).collect();
        Ok((scales, zeros))
    }

    /// Returns the group of each column; `None` where groups follow one another.
    fn groups(&self, matrix: &Matrix, packed: &Packed) -> Result<Option<Vec<u32>>, Error> {
        let Some(extent) = &packed.groups else { return Ok(None) };
        let n_columns = matrix.shape[1];
        let n_groups = n_columns.div_ceil(packed.group);
        let found = self.words(extent, [1, n_columns], 0, n_columns)?;
        // A negative one is a large number here.
        if let Some(i) = found.iter().position(|&group| group as usize >= n_groups) {
            let what = format!("column {i} of it is in group {}, there are {n_groups}", found[i] as i32);
            return Err(self.error(matrix, what));
        }
        let in_order = found.iter().enumerate().all(|(i, &group)| group as usize == i / packed.group);
        Ok((!in_order).then_some(found))
    }

    /// Values of `n` rows from `first` on.
    fn float8(&self, matrix: &Matrix, float8: &Float8, first: usize, n: usize) -> Result<Vec<f32>, Error> {
        let columns = matrix.shape[1];
        let mut bytes = vec![0; n * columns];
        self.sources[float8.data.file].read_at(float8.data.offset + first * columns, &mut bytes)?;
        let (scales, top) = self.block_scales(matrix, float8, first, n)?;
        let n_scales = columns.div_ceil(float8.block[1]);
        let mut values = vec![0.0; n * columns];
        for (i, (out, bytes)) in values.chunks_exact_mut(columns).zip(bytes.chunks_exact(columns)).enumerate() {
            let of_row = &scales[((first + i) / float8.block[0] - top) * n_scales..][..n_scales];
            for (column, (out, &byte)) in out.iter_mut().zip(bytes).enumerate() {
                *out = quant::types::small_float::load_e4m3(byte) * of_row[column / float8.block[1]];
            }
        }
        Ok(values)
    }

    /// Rows of a stack from `first` on.
    fn transposed(&self, matrix: &Matrix, stack: &Transposed, first: usize, out: &mut [u8]) -> Result<(), Error> {
        let [n_rows, columns] = matrix.shape;
        let (each, size) = (n_rows / stack.n_stack, stack.dtype.block_bytes());
        let row_bytes = columns * size;
        let (mut row, mut out) = (first, out);
        while !out.is_empty() {
            let (at, from) = (row / each, row % each);
            let n = (each - from).min(out.len() / row_bytes);
            let (here, rest) = out.split_at_mut(n * row_bytes);
            let len = each * row_bytes;
            let data = Extent { offset: stack.data.offset + at * len, len, ..stack.data };
            let values = self.strided(&data, [columns, each * size], from * size, n * size)?;
            for (column, values) in values.chunks_exact(n * size).enumerate() {
                for (row, value) in here.chunks_exact_mut(row_bytes).zip(values.chunks_exact(size)) {
                    row[column * size..][..size].copy_from_slice(value);
                }
            }
            (row, out) = (row + n, rest);
        }
        Ok(())
    }

    /// The scales of the matrices that rows from `first` on belong to, for each block.
    fn matrix_scales(&self, matrix: &Matrix, fp4: &Fp4, first: usize, out: &mut [u8]) -> Result<(), Error> {
        let mut scales = vec![0; fp4.scales.len];
        self.sources[fp4.scales.file].read_at(fp4.scales.offset, &mut scales)?;
        let (scales, _) = scales.as_chunks::<4>();
        let n_rows = matrix.shape[0] / scales.len(); // of one matrix
        let each = 4 * matrix.shape[1] / WeightType::NVFP4_SCALED.block_len();
        for (i, row) in out.chunks_exact_mut(each).enumerate() {
            row.as_chunks_mut().0.fill(scales[(first + i) / n_rows]);
        }
        Ok(())
    }

    /// Scales of rows from `first` on, for each group of the type.
    fn row_scales(&self, matrix: &Matrix, float8: &Float8, first: usize, out: &mut [u8]) -> Result<(), Error> {
        let group = WeightType::F8_E4M3.block_len();
        let n_groups = matrix.shape[1] / group;
        let n_scales = matrix.shape[1].div_ceil(float8.block[1]);
        let (scales, top) = self.block_scales(matrix, float8, first, out.len() / (4 * n_groups))?;
        for (i, row) in out.chunks_exact_mut(4 * n_groups).enumerate() {
            let of_row = &scales[((first + i) / float8.block[0] - top) * n_scales..][..n_scales];
            for (g, out) in row.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                *out = of_row[g * group / float8.block[1]].to_le_bytes();
            }
        }
        Ok(())
    }

    /// Scales of the blocks that rows `first` to `first + n` lie in, and the first of those rows of blocks.
    fn block_scales(
        &self,
        matrix: &Matrix,
        float8: &Float8,
        first: usize,
        n: usize,
    ) -> Result<(Vec<f32>, usize), Error> {
        let n_scales = matrix.shape[1].div_ceil(float8.block[1]);
        let (top, end) = (first / float8.block[0], (first + n).div_ceil(float8.block[0]));
        let each = n_scales * float8.scale_type.block_bytes();
        let mut raw = vec![0; (end - top) * each];
        self.sources[float8.scales.file].read_at(float8.scales.offset + top * each, &mut raw)?;
        let mut scales = vec![0.0; (end - top) * n_scales];
        quant::decode_row(float8.scale_type, &raw, &mut scales);
        Ok((scales, top))
    }

    /// Columns `from` to `from + n` of words `[rows, columns]`.
    fn words(&self, plane: &Extent, [rows, columns]: [usize; 2], from: usize, n: usize) -> Result<Vec<u32>, Error> {
        let bytes = self.strided(plane, [rows, 4 * columns], 4 * from, 4 * n)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }

    /// Bytes `from` to `from + len` of each row of a plane of `[rows, bytes of a row]`.
    fn strided(&self, plane: &Extent, [n, stride]: [usize; 2], from: usize, len: usize) -> Result<Vec<u8>, Error> {
        let file = &self.sources[plane.file];
        let mut out = vec![0; n * len];
        if len == stride {
            file.read_at(plane.offset, &mut out)?;
            return Ok(out);
        }
        for (i, out) in out.chunks_exact_mut(len.max(1)).enumerate() {
            file.read_at(plane.offset + i * stride + from, out)?;
        }
        Ok(out)
    }

    fn error(&self, matrix: &Matrix, what: String) -> Error {
        let (Form::Packed(Packed { codes: data, .. })
        | Form::Float8(Float8 { data, .. })
        | Form::Transposed(Transposed { data, .. })
        | Form::Fp4(Fp4 { blocks: data, .. })
        | Form::Columns(Columns { planes: Extents { q: data, .. }, .. })) = &matrix.form;
        let file = self.sources[data.file].path().to_string_lossy();
        Error::Unreadable { file: file.into(), tensor: printable(matrix.name.as_bytes()), why: what }
    }
}

/// Bytes of a row of floats.
fn row_len(matrix: &Matrix, out: &[u8], dtype: WeightType) -> usize {
    dtype.row_bytes(matrix.shape[1]).unwrap_or(out.len()).max(1)
}
