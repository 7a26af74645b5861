// A step's chunks: consecutive tokens of a sequence, and where its cache and its recurrent state are.
#pragma once

// As `Tables::fill` of `metal/tables.rs` writes it.
struct Chunk {
    uint first_page; // in the table of pages
    uint first_window_page;
    uint first_window_block; // of PAGE positions
    uint first; // token of the step
    uint len;
    uint pos; // of the first token
    uint state; // slot of recurrent states
};
