"""Makes crates/conformance/tests/data: tiny random models as GGUF files and folders, and their exact logits (README.md
there).

The witness is transformers (f32, eager attention, on the CPU), the code the models were published with: it shares
nothing with this project, and reads no GGUF file. Names, permutations and keys of the GGUF files are written here, as
llama.cpp's converters write them; the witness answers on the weights of the file, decoded by gguf-py.

    pip install torch==2.15.0 transformers==5.23.0 gguf==0.19.0 numpy==2.4.6 safetensors
    cd tools && python -m tiny [NAME]..

makes all of them, or the folders of these names. These versions give the same weights again; answers may differ in
their last bits, as sums of floats do on another CPU.

    python -m tiny.new MODEL_TYPE --out FOLDER

makes the folder and the exact logits of an architecture that this project does not know yet.
"""
