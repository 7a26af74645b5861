//! The run-time compiler: from a source to a cubin for an architecture, kept on disk by the hash of all that goes into
//! it.

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::nvrtc::sys::{nvrtcProgram, nvrtcResult};
use libloading::Library;

use super::driver;
use super::sources::{Key, Texts};

macro_rules! functions {
    ($($name:ident($($type:ty),*);)*) => {
        /// The library's functions that are called here.
        #[allow(non_snake_case, reason = "their names in the library")]
        struct Functions { $($name: unsafe extern "C" fn($($type),*) -> nvrtcResult,)* }

        impl Functions {
            /// # Safety
            /// The library is NVRTC, and stays loaded.
            unsafe fn of(library: &Library) -> Result<Functions, libloading::Error> {
                // SAFETY: the names are those of functions with these arguments.
                unsafe { Ok(Functions { $($name: *library.get(concat!(stringify!($name), "\0"))?,)* }) }
            }
        }
    };
}

functions! {
    nvrtcVersion(*mut c_int, *mut c_int);
    nvrtcGetNumSupportedArchs(*mut c_int);
    nvrtcGetSupportedArchs(*mut c_int);
    nvrtcCreateProgram(
        *mut nvrtcProgram,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char
    );
    nvrtcCompileProgram(nvrtcProgram, c_int, *const *const c_char);
    nvrtcGetProgramLogSize(nvrtcProgram, *mut usize);
    nvrtcGetProgramLog(nvrtcProgram, *mut c_char);
    nvrtcGetCUBINSize(nvrtcProgram, *mut usize);
    nvrtcGetCUBIN(nvrtcProgram, *mut c_char);
    nvrtcGetPTXSize(nvrtcProgram, *mut usize);
    nvrtcGetPTX(nvrtcProgram, *mut c_char);
    nvrtcDestroyProgram(*mut nvrtcProgram);
}

/// The library, found once by the names that its versions have.
fn functions() -> Result<&'static Functions, String> {
    static FOUND: OnceLock<Result<Functions, String>> = OnceLock::new();
    let find = || {
        for name in names(std::env::var_os("CUDA_PATH").map(PathBuf::from)) {
            // What it loads by itself lies next to it.
            #[cfg(windows)]
            if let Some(folder) = name.parent().filter(|_| name.is_file()) {
                let _ = ::sys::windows::find_libraries_in(folder);
            }
            // SAFETY: NVIDIA's libraries do nothing but set themselves up when they are loaded.
            let Ok(library) = (unsafe { Library::new(&name) }) else { continue };
            // SAFETY: the library has NVRTC's name, and is leaked.
            return unsafe { Functions::of(Box::leak(Box::new(library))) }
                .map_err(|e| format!("failed to load {}: {e}", name.display()));
        }
        Err("NVIDIA's run-time compiler (NVRTC) is not installed".into())
    };
    FOUND.get_or_init(find).as_ref().map_err(String::clone)
}

/// Names of the library, the newest version first: on Windows in the toolkit's folder, and where the system looks.
fn names(toolkit: Option<PathBuf>) -> Vec<PathBuf> {
    if !cfg!(windows) {
        let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
        return ["", ".13", ".12"].map(|version| format!("{prefix}nvrtc{suffix}{version}").into()).into();
    }
    let folders = toolkit.iter().flat_map(|folder| [folder.join("bin").join("x64"), folder.join("bin")]);
    let folders: Vec<PathBuf> = folders.chain([PathBuf::new()]).collect();
    let versions = ["nvrtc64_130_0.dll", "nvrtc64_120_0.dll"];
    folders.iter().flat_map(|folder| versions.map(|name| folder.join(name))).collect()
}

/// Major and minor version, or why there is none.
pub fn version() -> Result<(i32, i32), String> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the call writes two numbers.
    match unsafe { (functions()?.nvrtcVersion)(&mut major, &mut minor) } {
        nvrtcResult::NVRTC_SUCCESS if major >= 12 => Ok((major, minor)),
        nvrtcResult::NVRTC_SUCCESS => Err(format!("NVRTC is version {major}.{minor}, 12.0 is needed")),
        code => Err(format!("nvrtcVersion: {code:?}")),
    }
}

/// What the device runs, and what to compile for: a cubin of its own architecture, or PTX of the newest older one that
/// the compiler knows, which the driver finishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    arch: u32,
    is_cubin: bool,
}

impl Target {
    /// For compute capability `arch` (90 for 9.0).
    pub fn new(arch: u32) -> Result<Target, String> {
        if arch < 80 {
            return Err(format!("the device has compute capability {}.{}, 8.0 is needed", arch / 10, arch % 10));
        }
        let (nvrtc, mut n) = (functions()?, 0);
        // SAFETY: the first call writes a number, the second as many.
        let known = unsafe {
            checked((nvrtc.nvrtcGetNumSupportedArchs)(&mut n))?;
            let mut known = vec![0; n.max(0) as usize];
            checked((nvrtc.nvrtcGetSupportedArchs)(known.as_mut_ptr()))?;
            known
        };
        if known.contains(&(arch as i32)) {
            return Ok(Target { arch, is_cubin: true });
        }
        let older = known.into_iter().filter(|&known| (80..arch as i32).contains(&known)).max();
        older
            .map(|older| Target { arch: older as u32, is_cubin: false })
            .ok_or_else(|| format!("NVRTC cannot compile for compute capability {}.{}", arch / 10, arch % 10))
    }

    /// A cubin of this architecture, which the compiler knows.
    ///
    /// # Errors
    /// It does not know it.
    pub fn exactly(arch: u32) -> Result<Target, String> {
        let target = Target::new(arch)?;
        match target.is_cubin {
            true => Ok(target),
            false => Err(format!("NVRTC cannot compile for compute capability {}.{}", arch / 10, arch % 10)),
        }
    }

    /// A cubin for an architecture whether a device is there or not.
    #[cfg(test)]
    pub fn cubin(arch: u32) -> Target {
        Target { arch, is_cubin: true }
    }

    /// The compiler's option. Hopper's own instructions want the `a`.
    fn option(self) -> String {
        match self {
            Target { arch: 90, is_cubin: true } => "--gpu-architecture=sm_90a".into(),
            Target { arch, is_cubin: true } => format!("--gpu-architecture=sm_{arch}"),
            Target { arch, is_cubin: false } => format!("--gpu-architecture=compute_{arch}"),
        }
    }
}

/// What to compile for on a device of this compute capability. `is_ahead`: kernels may have been compiled ahead, so
/// that no compiler is needed.
///
/// # Errors
/// A sentence: there is no compiler, or none that knows the device.
pub fn target(arch: u32, is_ahead: bool) -> Result<Target, String> {
    // Images of an older card are finished by the driver.
    if driver::older_arch() == Some(arch) {
        return version().map(|_| Target { arch, is_cubin: false });
    }
    match version() {
        Err(_) if is_ahead && arch >= 80 => Ok(Target { arch, is_cubin: true }),
        Err(why) => Err(why),
        Ok(_) => Target::new(arch),
    }
}

fn checked(code: nvrtcResult) -> Result<(), String> {
    if code == nvrtcResult::NVRTC_SUCCESS { Ok(()) } else { Err(format!("{code:?}")) }
}

/// A compiled module and what the assembler said of it: registers, stack and spills of every kernel.
pub struct Compiled {
    /// Cubin, or PTX that ends with a zero.
    pub image: Vec<u8>,
    #[cfg_attr(not(test), expect(dead_code, reason = "a test reads it"))]
    pub log: String,
}

fn options(key: &Key, target: Target) -> Vec<String> {
    let mut options = vec![target.option(), "-std=c++17".into(), "-default-device".into(), "--ptxas-options=-v".into()];
    options.extend(key.defines.iter().map(|define| format!("-D{define}")));
    options
}

/// Where a module is kept: in a cache, by the compiler's version too, or in a folder of what was compiled ahead.
fn file(folder: &Path, key: &Key, texts: &Texts, options: &[String], version: Option<(i32, i32)>) -> PathBuf {
    folder.join(format!("{}-{:032x}.cubin", key.file, hash(key, texts, options, version)))
}

/// A module that was compiled ahead, or that `cache` has.
pub fn find(key: &Key, texts: &Texts, target: Target, ahead: Option<&Path>, cache: Option<&Path>) -> Option<Vec<u8>> {
    let options = options(key, target);
    let read = |folder: Option<&Path>, version| read_cached(&file(folder?, key, texts, &options, version));
    read(ahead, None).or_else(|| read(cache, Some(version().ok()?)))
}

/// Compiles a module into a folder, where it is not there yet.
pub fn compile_ahead(key: &Key, texts: &Texts, target: Target, folder: &Path) -> Result<(), String> {
    let options = options(key, target);
    let file = file(folder, key, texts, &options, None);
    if read_cached(&file).is_some() {
        return Ok(());
    }
    let compiled = compile(key, texts, target, None)?;
    write_cached(&file, &compiled.image).map_err(|e| format!("write {}: {e}", file.display()))
}

/// Compiles a module, and keeps it in `cache`.
pub fn compile(key: &Key, texts: &Texts, target: Target, cache: Option<&Path>) -> Result<Compiled, String> {
    let version = version()?;
    let compiled = run(key, texts, &options(key, target), target.is_cubin)
        .map_err(|why| format!("compile kernels/cuda/{} for {}: {why}", key.file, target.option()))?;
    if let Some(folder) = cache {
        keep(key, texts, target, version, folder, &compiled.image);
    }
    Ok(compiled)
}

/// Keeps a compiled module in a cache.
pub fn keep(key: &Key, texts: &Texts, target: Target, version: (i32, i32), folder: &Path, image: &[u8]) {
    // A cache that cannot be written costs time at the next start and nothing else.
    let _ = write_cached(&file(folder, key, texts, &options(key, target), Some(version)), image);
}

/// Length and sum in front of an image, so that a file that was cut short is compiled again.
const MAGIC: &[u8; 8] = b"moebius1";

fn read_cached(file: &Path) -> Option<Vec<u8>> {
    let bytes = std::fs::read(file).ok()?;
    let (head, image) = bytes.split_at_checked(24)?;
    let sum = fnv(0xcbf2_9ce4_8422_2325, image);
    let wanted = [&MAGIC[..], &(image.len() as u64).to_le_bytes(), &sum.to_le_bytes()].concat();
    (head == wanted).then(|| image.to_vec())
}

fn write_cached(file: &Path, image: &[u8]) -> std::io::Result<()> {
    let Some(folder) = file.parent() else { return Ok(()) };
    std::fs::create_dir_all(folder)?;
    let sum = fnv(0xcbf2_9ce4_8422_2325, image);
    let bytes = [&MAGIC[..], &(image.len() as u64).to_le_bytes(), &sum.to_le_bytes(), image].concat();
    // Another process may do the same: each renames its own complete file.
    let own = file.with_extension(format!("{}.part", std::process::id()));
    std::fs::write(&own, bytes)?;
    std::fs::rename(own, file)
}

/// FNV-1a: the cache guards against accidents, not against an attacker who can write the user's files.
fn fnv(start: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(start, |hash, &b| (hash ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3))
}

fn hash(key: &Key, texts: &Texts, options: &[String], version: Option<(i32, i32)>) -> u128 {
    let (source, version) = (texts.source(key), format!("{version:?}"));
    // Headers are the same for all modules.
    let [high, low] = texts.headers_hash(|headers| {
        HASH_STARTS.map(|start| headers.iter().fold(start, |hash, (name, text)| parts(hash, [name, &**text])))
    });
    let of_module = || options.iter().map(String::as_str).chain([&*source, &version]);
    u128::from(parts(high, of_module())) << 64 | u128::from(parts(low, of_module()))
}

const HASH_STARTS: [u64; 2] = [0xcbf2_9ce4_8422_2325, 0x9e37_79b9_7f4a_7c15];

/// Goes on with texts, each behind its length.
fn parts<'a>(hash: u64, texts: impl IntoIterator<Item = &'a str>) -> u64 {
    texts.into_iter().fold(hash, |hash, text| fnv(fnv(hash, &(text.len() as u64).to_le_bytes()), text.as_bytes()))
}

fn run(key: &Key, texts: &Texts, options: &[String], is_cubin: bool) -> Result<Compiled, String> {
    let c_string = |text: &str| CString::new(text).map_err(|e| e.to_string());
    let (source, name) = (c_string(&texts.source(key))?, c_string(key.file)?);
    let strings = |all: &[&str]| all.iter().map(|text| c_string(text)).collect::<Result<Vec<_>, _>>();
    let header_names = strings(&texts.headers.iter().map(|(name, _)| *name).collect::<Vec<_>>())?;
    let header_texts = strings(&texts.headers.iter().map(|(_, text)| &**text).collect::<Vec<_>>())?;
    let options = strings(&options.iter().map(String::as_str).collect::<Vec<_>>())?;
    let pointers = |all: &[CString]| all.iter().map(|text| text.as_ptr()).collect::<Vec<*const c_char>>();
    let (names, texts, options) = (pointers(&header_names), pointers(&header_texts), pointers(&options));
    let (nvrtc, mut program) = (functions()?, std::ptr::null_mut());
    // SAFETY: strings end with zeros and outlive the program; each buffer is as long as the compiler says.
    unsafe {
        let made = (nvrtc.nvrtcCreateProgram)(
            &mut program,
            source.as_ptr(),
            name.as_ptr(),
            names.len() as i32,
            texts.as_ptr(),
            names.as_ptr(),
        );
        checked(made)?;
        let result = (nvrtc.nvrtcCompileProgram)(program, options.len() as i32, options.as_ptr());
        let mut n = 0;
        (nvrtc.nvrtcGetProgramLogSize)(program, &mut n);
        let mut log = vec![0u8; n.max(1)];
        (nvrtc.nvrtcGetProgramLog)(program, log.as_mut_ptr().cast());
        log[n.max(1) - 1] = 0;
        let log = CStr::from_ptr(log.as_ptr().cast()).to_string_lossy().into_owned();
        let compiled = checked(result).map_err(|e| format!("{e}: {}", log.trim())).and_then(|()| {
            let mut n = 0;
            checked(if is_cubin {
                (nvrtc.nvrtcGetCUBINSize)(program, &mut n)
            } else {
                (nvrtc.nvrtcGetPTXSize)(program, &mut n)
            })?;
            let mut image = vec![0u8; n];
            let to = image.as_mut_ptr().cast();
            checked(if is_cubin { (nvrtc.nvrtcGetCUBIN)(program, to) } else { (nvrtc.nvrtcGetPTX)(program, to) })?;
            Ok(Compiled { image, log })
        });
        (nvrtc.nvrtcDestroyProgram)(&mut program);
        compiled
    }
}
