-- Sends the HTTP requests in the files 0, 1, … of a directory: wrk … -s wrk.lua URL -- DIRECTORY; prints one line of JSON.
local requests, at = {}, 0

function init(arguments)
  local file = assert(io.open(arguments[1] .. "/0", "rb"))
  while file do
    requests[#requests + 1] = file:read("*a")
    file:close()
    file = io.open(arguments[1] .. "/" .. #requests, "rb")
  end
end

function request()
  at = at % #requests + 1
  return requests[at]
end

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    'JSON{"requests":%d,"duration_us":%d,"p50_us":%d,"p99_us":%d,"broken":%d,"refused":%d}\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    errors.connect + errors.read + errors.write + errors.timeout, errors.status))
end
