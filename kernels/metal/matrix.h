// Which numbers of an 8 x 8 matrix a lane holds, as MLX relies on: two of one row, side by side.
#pragma once

inline uint row_of_lane(uint lane) { return (lane >> 4 & 1) * 4 + (lane >> 1 & 3); }
inline uint column_of_lane(uint lane) { return (lane >> 3 & 1) * 4 + (lane & 1) * 2; }
