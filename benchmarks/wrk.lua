-- Sends the prepared requests of a directory in order: wrk … -s wrk.lua URL -- DIRECTORY NUMBER; prints one line of JSON.
local requests, at = {}, 0

local function read(path)
  local file = assert(io.open(path, "rb"))
  local text = file:read("*a")
  file:close()
  return text
end

function init(arguments)
  for i = 0, tonumber(arguments[2]) - 1 do
    local stem = arguments[1] .. "/" .. i
    local headers = {}
    for name, value in read(stem .. ".head"):gmatch("([^\n:]+): ([^\n]*)\n") do
      headers[name] = value
    end
    requests[#requests + 1] = wrk.format("POST", nil, headers, read(stem .. ".body"))
  end
end

function request()
  at = at % #requests + 1
  return requests[at]
end

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    'JSON{"requests":%d,"duration_us":%d,"bytes":%d,"p50_us":%d,"p90_us":%d,"p99_us":%d,"max_us":%d,"mean_us":%d,'
      .. '"broken":%d,"refused":%d}\n',
    summary.requests, summary.duration, summary.bytes, latency:percentile(50), latency:percentile(90),
    latency:percentile(99), latency.max, latency.mean,
    errors.connect + errors.read + errors.write + errors.timeout, errors.status))
end
