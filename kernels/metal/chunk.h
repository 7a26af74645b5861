// A step's chunks: consecutive tokens of a sequence, and where its cache and its recurrent state are.
#pragma once

// As `Tables::fill` of `commands/tables.rs` writes it.
struct Chunk {
    uint first_page; // in the table of pages
    uint first_window_page;
    uint first_window_block; // of PAGE positions
    uint first; // token of the step
    uint len;
    uint pos; // of the first token
    uint state; // slot of recurrent states
    uint n_draft; // of the last tokens, which leave the state where it stands before them
    uint n_replay; // accepted drafts of the slot's last step, past which its state has not moved
};
