//! The native half of the Python package: `moebius._native`. Python's half (`python/moebius`) has the names, types and
//! words that users see; here is what cannot be said there: the model, waiting without Python's lock, Ctrl-C.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, mpsc};
use std::time::Duration;

use moebius::local::{self, Got, Local, Wanted};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

#[global_allocator]
static ALLOCATOR: moebius::Allocator = moebius::Allocator;

pyo3::create_exception!(moebius, Error, pyo3::exceptions::PyException, "What failed, in a sentence.");

/// How long a wait lasts before signals are looked at.
const PATIENCE: Duration = Duration::from_millis(50);

/// A loaded model.
#[pyclass(frozen, module = "moebius._native")]
struct Engine(Arc<Local>);

#[pymethods]
impl Engine {
    /// Loads a model; flags are those of `moebius serve`.
    #[new]
    fn new(py: Python<'_>, flags: Vec<String>) -> PyResult<Engine> {
        apart(py, move || Local::open(words(flags))).map(Engine)
    }

    /// What the model is.
    fn about<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let about = self.0.about();
        let dict = PyDict::new(py);
        dict.set_item("name", about.name)?;
        dict.set_item("description", about.description)?;
        dict.set_item("architecture", about.architecture)?;
        dict.set_item("file_type", about.file_type)?;
        dict.set_item("context", about.context)?;
        dict.set_item("vocab_size", about.vocabulary)?;
        dict.set_item("parameters", about.parameters)?;
        dict.set_item("size_bytes", about.bytes)?;
        dict.set_item("embedded", about.is_embedded)?;
        dict.set_item("has_chat_template", about.has_chat_template)?;
        dict.set_item("parallel", about.parallel)?;
        dict.set_item("routers", about.routers)?;
        dict.set_item("backend", &self.0.backend)?;
        dict.set_item("notes", &self.0.notes)?;
        Ok(dict)
    }

    /// A request to a route of the server; POST where it has a body.
    #[pyo3(signature = (path, body=None))]
    fn call(&self, path: &str, body: Option<String>) -> PyResult<Call> {
        let call = Mutex::new(Some(self.0.call(path, body).map_err(failed)?));
        Ok(Call { call, is_cancelled: AtomicBool::new(false) })
    }

    /// What a model computes at some tokens, as rows in the machine's order: logits, hidden states, ids of experts
    /// (u16) and their weights; empty where it is not wanted or not known.
    fn trace<'py>(
        &self,
        py: Python<'py>,
        tokens: Vec<u32>,
        place: (usize, usize),
        wanted: (bool, bool, bool),
    ) -> PyResult<[Bound<'py, PyBytes>; 4]> {
        let ((start, positions), (logits, hidden, experts)) = (place, wanted);
        let wanted = Wanted { logits, hidden, experts };
        let traced = py.detach(|| self.0.trace(&tokens, start, positions, wanted)).map_err(failed)?;
        Ok([
            numbers(py, &traced.logits, f32::to_ne_bytes)?,
            numbers(py, &traced.hidden, f32::to_ne_bytes)?,
            numbers(py, &traced.experts, u16::to_ne_bytes)?,
            numbers(py, &traced.weights, f32::to_ne_bytes)?,
        ])
    }

    /// Sequences that are computed or wait, and pages of the cache that are in use.
    fn busy(&self) -> (usize, usize) {
        self.0.busy()
    }

    /// Lets clients in; flags are those of `moebius serve`.
    fn serve(&self, py: Python<'_>, flags: Vec<String>, keys: &str) -> PyResult<Server> {
        let server = py.detach(|| self.0.serve(words(flags), keys)).map_err(failed)?;
        Ok(Server { url: server.url(), server: Mutex::new(server) })
    }

    /// Ends the engine.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.0.close()).map_err(failed)
    }
}

/// A request under way.
#[pyclass(frozen, module = "moebius._native")]
struct Call {
    call: Mutex<Option<local::Call>>,
    is_cancelled: AtomicBool,
}

#[pymethods]
impl Call {
    /// Waits for the head of the answer: its status, and the fields that had no effect.
    fn head(&self, py: Python<'_>) -> PyResult<(u16, Option<String>)> {
        match self.wait(py)? {
            Got::Head { status, ignored } => Ok((status, ignored)),
            _ => Err(Error::new_err("failed to read the answer: its head was read before")),
        }
    }

    /// Waits for the next piece of its body; none behind the last.
    fn piece<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        match self.wait(py)? {
            Got::Piece(piece) => Ok(Some(PyBytes::new(py, &piece))),
            Got::End => Ok(None),
            Got::Head { .. } | Got::Nothing => {
                Err(Error::new_err("failed to read the answer: its head comes before its body"))
            }
        }
    }

    /// Ends the request; what it had in the engine is free before the next step. Waits for nothing: a thread that waits
    /// for the answer ends the request in a moment.
    fn cancel(&self, py: Python<'_>) {
        self.is_cancelled.store(true, Ordering::Release);
        py.detach(|| match self.call.try_lock() {
            Ok(mut call) => drop(call.take()),
            Err(TryLockError::Poisoned(call)) => drop(call.into_inner().take()),
            Err(TryLockError::WouldBlock) => {}
        });
    }
}

impl Call {
    fn wait(&self, py: Python<'_>) -> PyResult<Got> {
        loop {
            let got = py.detach(|| {
                let mut call = lock(&self.call);
                if self.is_cancelled.load(Ordering::Acquire) {
                    *call = None;
                }
                call.as_mut().map(|call| call.wait(PATIENCE))
            });
            if let Err(interrupt) = py.check_signals() {
                // Whoever handles it may hold this call for long, by the frames of its traceback.
                self.cancel(py);
                return Err(interrupt);
            }
            match got {
                None => return Ok(Got::End),
                Some(Got::Nothing) => {}
                Some(got) => return Ok(got),
            }
        }
    }
}

/// Clients are let in while it lives.
#[pyclass(frozen, module = "moebius._native")]
struct Server {
    #[pyo3(get)]
    url: String,
    server: Mutex<local::Server>,
}

#[pymethods]
impl Server {
    /// Takes no more requests, waits so many seconds for those that run, and cuts off the others.
    fn close(&self, py: Python<'_>, seconds: f64) -> PyResult<()> {
        let patience = Duration::try_from_secs_f64(seconds)
            .map_err(|why| pyo3::exceptions::PyValueError::new_err(why.to_string()))?;
        py.detach(|| lock(&self.server).close(patience));
        Ok(())
    }
}

/// Runs a command line of the program, whose first word is its name; the exit status.
#[pyfunction]
fn main(py: Python<'_>, args: Vec<OsString>) -> u8 {
    py.detach(|| moebius::main(args))
}

/// Fetches a model of Hugging Face's unless it is here; the path to load.
#[pyfunction]
fn pull(py: Python<'_>, name: PathBuf) -> PyResult<PathBuf> {
    apart(py, move || local::pull(&name))
}

/// Says how another process becomes this program: a command before its arguments.
#[pyfunction]
fn start_with(command: Vec<OsString>) {
    moebius::try_grammars_with(command);
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("Error", module.py().get_type::<Error>())?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<Engine>()?;
    module.add_class::<Call>()?;
    module.add_class::<Server>()?;
    module.add_function(wrap_pyfunction!(main, module)?)?;
    module.add_function(wrap_pyfunction!(pull, module)?)?;
    module.add_function(wrap_pyfunction!(start_with, module)?)
}

/// Does what takes long on another thread, so that Ctrl-C need not wait for its end.
fn apart<T: Send + 'static>(py: Python<'_>, act: impl FnOnce() -> anyhow::Result<T> + Send + 'static) -> PyResult<T> {
    let (send, done) = mpsc::sync_channel(1);
    std::thread::Builder::new().name("load".into()).spawn(move || send.send(act()))?;
    let done = Mutex::new(done);
    loop {
        match py.detach(|| lock(&done).recv_timeout(PATIENCE)) {
            Ok(result) => return result.map_err(failed),
            Err(mpsc::RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(Error::new_err("failed to load the model: its thread has ended"));
            }
        }
    }
}

/// Numbers as bytes, for NumPy.
fn numbers<'py, T: Copy, const N: usize>(
    py: Python<'py>,
    numbers: &[T],
    bytes_of: impl Fn(T) -> [u8; N],
) -> PyResult<Bound<'py, PyBytes>> {
    PyBytes::new_with(py, N * numbers.len(), |bytes| {
        for (to, &number) in bytes.as_chunks_mut::<N>().0.iter_mut().zip(numbers) {
            *to = bytes_of(number);
        }
        Ok(())
    })
}

fn words(flags: Vec<String>) -> Vec<OsString> {
    flags.into_iter().map(OsString::from).collect()
}

/// An error as a sentence with its causes.
fn failed(error: anyhow::Error) -> PyErr {
    Error::new_err(moebius::causes(&error))
}

/// What a lock guards here stays whole when a thread ends inside.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
